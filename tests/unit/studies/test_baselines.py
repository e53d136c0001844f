"""The studies' baselines: formulas, declared facts, expectation. They are a user's: named by module and function.

Not covered: variance (`study variance` measures it).
"""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from torch import Tensor

from oblr_megatron.algo.baseline import STD_EPS, advantages, baseline_values
from oblr_megatron.algo.user_baseline import check_baseline
from oblr_megatron.errors import RunError
from studies import baselines
from studies.variance import OWN
from tests.unit.algo import test_unbiased
from tests.unit.algo.conftest import Toy, make_toy
from tests.unit.algo.test_baseline import batches, tensor
from tests.unit.algo.test_unbiased import expectation

Batch = tuple[Tensor, Tensor, Tensor]


def named(function: str) -> str:
    return f"studies.baselines:{function}"


@pytest.fixture(scope="module")
def toy() -> Toy:
    return make_toy(seed=0)


@pytest.mark.parametrize("name", OWN)
def test_the_declared_facts_hold(name: str) -> None:
    for num_prompts, group_size in ((4, 4), (2, 2), (3, 7)):
        check_baseline(named(name), num_prompts, group_size)


def test_each_formula_on_a_worked_group() -> None:
    rewards, norms, lengths = tensor([1, 0, 3], [2, 2, 5]), tensor([1, 2, 3], [1, 1, 2]), tensor([2, 4, 6], [1, 1, 1])

    def found(name: str) -> list[float]:
        return list(baseline_values(named(name), rewards, norms, lengths)[0].tolist())

    assert found("eob") == pytest.approx([10 / 6] * 3, rel=1e-14)
    assert found("reinforce_pp_baseline") == pytest.approx([4 / 3] * 3, rel=1e-14)


@given(batches())
def test_james_stein_is_the_published_formula(batch: Batch) -> None:
    """Loops over prompts and responses, as in the authors' code."""
    rewards, _, _ = batch
    num_prompts, size = rewards.shape
    want = torch.zeros_like(rewards)
    for q in range(num_prompts):
        others = [rewards[p].tolist() for p in range(num_prompts) if p != q]
        means = [statistics.fmean(group) for group in others]
        v = statistics.fmean(statistics.variance(group) / size for group in others)
        s = statistics.fmean((mean - statistics.fmean(means)) ** 2 for mean in means)
        pull = v / (v + s + baselines.JAMES_STEIN_EPS)
        for i in range(size):
            own = (float(rewards[q].sum()) - float(rewards[q, i])) / (size - 1)
            want[q, i] = (1 - pull) * own + pull * statistics.fmean(means)
    torch.testing.assert_close(baseline_values(named("james_stein"), *batch), want, rtol=1e-7, atol=1e-9)


def test_reinforce_pp_baseline_divides_by_the_deviation_of_the_centred_rewards() -> None:
    rewards = tensor([1, 0], [0, 0])
    got = advantages(named("reinforce_pp_baseline"), rewards, torch.ones_like(rewards), torch.ones_like(rewards))
    spread = math.sqrt((0.5**2 + 0.5**2) / 3)
    assert got.flatten().tolist() == pytest.approx([x / (spread + STD_EPS) for x in (0.5, -0.5, 0, 0)])


@given(batches())
def test_eob_is_optimal_with_the_own_response(batch: Batch) -> None:
    """A_i = (r_i - b_i^optimal) times the others' share of w: the same sign, and less of it."""
    rewards, norms, lengths = batch
    norms = norms + 1  # no group without weights
    share = norms / norms.sum(-1, keepdim=True)
    want = (1 - share) * advantages("optimal", rewards, norms, lengths)
    torch.testing.assert_close(advantages(named("eob"), rewards, norms, lengths), want, rtol=1e-9, atol=1e-9)


@given(batches())
def test_leave_one_out_stays_between_the_others_rewards(batch: Batch) -> None:
    rewards, _, _ = batch
    b = baseline_values(named("james_stein"), *batch)
    prior = (rewards.mean(-1).sum() - rewards.mean(-1)) / (len(rewards) - 1)
    for q, i in ((q, i) for q in range(rewards.shape[0]) for i in range(rewards.shape[1])):
        others = torch.cat((rewards[q, :i], rewards[q, i + 1 :]))
        others = torch.cat((others, prior[q : q + 1] - 1e-12, prior[q : q + 1] + 1e-12))
        assert others.min() <= b[q, i] <= others.max()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("name", "share"), [("james_stein", 0), ("reinforce_pp_baseline", None)])
def test_a_prior_is_unbiased_and_a_deviation_biases(toy: Toy, name: str, share: int | None, size: int) -> None:
    test_unbiased.test_baselines_of_the_whole_batch(toy, named(name), share, size)


def test_eob_biases_the_gradients_direction(toy: Toy) -> None:
    got, want = expectation(toy, named("eob"), 3), toy.gradients.mean(0)
    assert torch.cosine_similarity(got, want, dim=0) < 1 - 1e-5


def test_a_prior_of_one_prompt_is_refused() -> None:
    with pytest.raises(RunError, match="NaN"):
        advantages(named("james_stein"), tensor([0, 1]), tensor([1, 1]), tensor([1, 1]))
