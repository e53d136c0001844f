"""Exact expectation and variance of the estimator: all groups of a four-response policy are enumerated in fp64.

Not covered: language models, lower precision, importance ratios.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oblr_megatron.algo.baseline import advantages
from oblr_megatron.algo.formulas import History
from oblr_megatron.algo.loss import sample_coefficients
from oblr_megatron.algo.pools import Pools
from oblr_megatron.algo.weighting import tempering
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.config.baselines import BASELINES
from oblr_megatron.types import Prompt, Scored
from tests.unit.algo.conftest import make_toy

UNBIASED = ["none", "rloo", "optimal", "pooled_mean", "pooled", "optimal_pooled"]
EXPECTED, PULL = (0.37, -0.8), 0.6  # what earlier steps told about each prompt, whatever it was
MEAN_NORM = 0.7  # of earlier steps


def group_gradients(toy, name: str, prompt: int, size: int, power: float = 0.0) -> tuple[Tensor, Tensor]:
    """(1/G) sum_i A_i s_i of every group of a prompt [E, D], and the groups' probabilities [E]."""
    picks, probs = toy.groups(prompt, size)
    rewards, norms_sq, lengths = (tensor[prompt][picks] for tensor in (toy.rewards, toy.norms_sq, toy.lengths))
    history = History(torch.full((len(picks),), EXPECTED[prompt], dtype=torch.float64), PULL, MEAN_NORM)
    advantage = advantages(name, rewards, norms_sq, lengths, history) * tempering(norms_sq, MEAN_NORM, power)
    return torch.einsum("eg,egd->ed", advantage, toy.scores[prompt][picks]) / size, probs


def expectation(toy, name: str, size: int, power: float = 0.0) -> Tensor:
    """E[g] over prompts and groups."""
    parts = [group_gradients(toy, name, prompt, size, power) for prompt in range(len(toy.probs))]
    return torch.stack([probs @ gradients for gradients, probs in parts]).mean(0)


def variance(toy, name: str, size: int) -> float:
    """tr Cov of the first prompt's group gradient."""
    gradients, probs = group_gradients(toy, name, 0, size)
    return float(probs @ (gradients - probs @ gradients).square().sum(-1))


def test_the_toy_is_a_policy(toy):
    torch.testing.assert_close(toy.probs.sum(-1), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-14)
    mean_score = torch.einsum("pk,pkd->pd", toy.probs, toy.scores)
    torch.testing.assert_close(mean_score, torch.zeros_like(mean_score), rtol=0, atol=1e-14)
    by_scores = torch.einsum("pk,pk,pkd->pd", toy.probs, toy.rewards, toy.scores)
    torch.testing.assert_close(by_scores, toy.gradients, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for name in UNBIASED for size in (1, 2, 3, 4) if size > 1 or not BASELINES[name].needs_group],
)
def test_the_estimator_is_unbiased(toy, name, size):
    torch.testing.assert_close(expectation(toy, name, size), toy.gradients.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["pooled_mean", "pooled"])
def test_the_second_step_of_real_pools_is_unbiased(toy, name):
    """Every outcome of two steps of one response to each of two prompts; the pools have the first step's rewards."""
    prompts = [Prompt(number, str(number), "", (1,), "", "toy") for number in range(2)]
    picks = [(a, b) for a in range(toy.probs.shape[1]) for b in range(toy.probs.shape[1])]

    def values(tensor: Tensor, pick: tuple[int, int]) -> Tensor:
        return torch.stack([tensor[prompt, response] for prompt, response in enumerate(pick)])

    total, spread = torch.zeros_like(toy.gradients[0]), set()
    for first in picks:
        pools = Pools(AlgoConfig(baseline=name))
        rewards, norms, lengths = (values(part, first)[:, None] for part in (toy.rewards, toy.norms_sq, toy.lengths))
        pools.observe(prompts, Scored(rewards, lengths, 0), norms, pools.history(prompts))
        history = pools.history(prompts)
        spread.add(tuple(history.expected.tolist()))
        for second in picks:
            chance = values(toy.probs, first).prod() * values(toy.probs, second).prod()
            rewards, norms, lengths = (
                values(part, second)[:, None] for part in (toy.rewards, toy.norms_sq, toy.lengths)
            )
            advantage = advantages(name, rewards, norms, lengths, history)
            total += chance * torch.einsum("p,pd->d", advantage[:, 0], values(toy.scores, second)) / 2
    assert len(spread) > 4, "the pools depend on the first step"
    torch.testing.assert_close(total, toy.gradients.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("name", "share"), [("batch_mean", 1), ("reinforce_pp", None)])
def test_baselines_of_the_whole_batch(toy, name, share, size):
    """The batch mean scales E[g] by 1 - 1 / (Q G), and a std biases the direction: share None."""
    (first, p_first), (second, p_second) = toy.groups(0, size, ordered=False), toy.groups(1, size, ordered=False)
    total = torch.zeros_like(toy.gradients[0])
    for a, p_a in zip(first, p_first, strict=True):
        for b, p_b in zip(second, p_second, strict=True):
            rewards, norms, lengths = (
                torch.stack((tensor[0][a], tensor[1][b])) for tensor in (toy.rewards, toy.norms_sq, toy.lengths)
            )
            scores = torch.stack((toy.scores[0][a], toy.scores[1][b]))
            advantage = advantages(name, rewards, norms, lengths)
            total += p_a * p_b * torch.einsum("qg,qgd->d", advantage, scores) / (2 * size)
    true = toy.gradients.mean(0)
    if share is None:
        assert torch.cosine_similarity(total, true, dim=0) < 1 - 1e-5
    else:
        torch.testing.assert_close(total, (1 - share / (2 * size)) * true, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_group_mean_scales_the_gradient_by_one_minus_its_own_share(toy, size):
    want = (1 - 1 / size) * toy.gradients.mean(0)
    torch.testing.assert_close(expectation(toy, "group_mean", size), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["opo", "grpo"])
def test_opo_and_grpo_bias_the_gradients_direction(toy, name):
    got, want = expectation(toy, name, 3), toy.gradients.mean(0)
    assert torch.cosine_similarity(got, want, dim=0) < 1 - 1e-5


@pytest.mark.parametrize(
    ("aggregation", "unbiased"), [("constant", True), ("token_mean", False), ("sample_mean", False)]
)
def test_only_constant_aggregation_is_unbiased(toy, aggregation, unbiased):
    picks, probs = toy.groups(0, 3)
    rewards, norms, lengths = (tensor[0][picks] for tensor in (toy.rewards, toy.norms_sq, toy.lengths))
    advantage = advantages("rloo", rewards, norms, lengths)
    rows = zip(advantage, lengths, strict=True)
    coefficients = torch.stack([sample_coefficients(a, length, 1, 3, aggregation) for a, length in rows])
    got = torch.einsum("e,eg,egd->d", probs, coefficients, toy.scores[0][picks])
    gap = 1 - torch.cosine_similarity(got, toy.gradients[0], dim=0)
    assert gap < 1e-12 if unbiased else gap > 1e-5


def test_a_constant_reward_has_a_gradient_under_sample_mean(toy):
    """E[s] = 0, but E[s / L] is not 0."""
    drift = torch.einsum("k,kd->d", toy.probs[0], toy.scores[0] / toy.lengths[0, :, None])
    assert drift.norm() > 1e-2


@pytest.mark.parametrize(("seed", "size", "ratio"), [(0, 2, 1.0), (0, 4, 0.738), (0, 6, 0.743), (2, 4, 1.521)])
def test_norm_weights_reduce_the_variance_where_reward_and_norm_disagree(seed, size, ratio):
    """The only right answer has the smallest norm, so that the best baseline is far from the mean reward.

    With seed 2 a few rare responses have nearly all the norm: four samples cannot estimate E[w r] / E[w].
    """
    toy = make_toy(seed, num_prompts=1, spread=0.5, rewards=torch.tensor([[0.0, 0, 0, 1]], dtype=torch.float64))
    assert variance(toy, "optimal", size) / variance(toy, "rloo", size) == pytest.approx(ratio, abs=1e-3)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("power", [0.125, 0.25, 0.5])
def test_tempering_has_exactly_this_bias(toy, size, power):
    """E[g] = E_q sum_o pi(o) (r - b) (wbar / w)^gamma s, which is not the gradient of the expected reward."""
    centred = toy.rewards - torch.tensor(EXPECTED, dtype=torch.float64)[:, None]
    factors = (MEAN_NORM / toy.norms_sq) ** power
    want = torch.einsum("pk,pkd->pd", toy.probs * centred * factors, toy.scores).mean(0)
    torch.testing.assert_close(expectation(toy, "pooled", size, power), want, rtol=0, atol=1e-12)
    cosine = torch.cosine_similarity(want, toy.gradients.mean(0), dim=0)
    assert cosine < 1 - 1e-4


def test_tempering_leaves_a_policy_alone_where_the_reward_equals_the_baseline():
    rewards = torch.tensor(EXPECTED, dtype=torch.float64)[:, None].expand(2, 4)
    assert not expectation(make_toy(1, rewards=rewards), "pooled", 1, 0.25).any()
