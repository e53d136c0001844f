"""Pools of earlier rewards: the sums by hand, what is left out, and how good the predictions are.

Unbiasedness is test_unbiased.py's subject. Not covered: policies that change between steps.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oblr_megatron.algo.formulas import NO_HISTORY
from oblr_megatron.algo.pools import Pools, pools_of
from oblr_megatron.algo.weighting import mean_of_others
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.types import Prompt, Scored

DECAY = 0.5


def prompt(name: str, source: str = "sums") -> Prompt:
    return Prompt(0, name, "", (1,), "", source)


def tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def make(**options: Any) -> Pools:
    return Pools(AlgoConfig(**{"baseline": "pooled", "pool_decay": DECAY} | options))


def step(pools: Pools, prompts: list[Prompt], rewards: Tensor, weights: Tensor) -> None:
    pools.observe(prompts, Scored(rewards, torch.ones_like(rewards), 0), weights, pools.history(prompts))


def expected(pools: Pools, *prompts: Prompt) -> list[float]:
    found = pools.history(prompts).expected
    assert found is not None
    return found.tolist()


def test_a_pool_is_the_decayed_weighted_mean_of_its_source() -> None:
    pools = make()
    assert math.isnan(expected(pools, prompt("a"))[0]), "nothing is known before the first step"
    step(pools, [prompt("a"), prompt("b")], tensor([1.0, 0.0], [1.0, 1.0]), tensor([1.0, 3.0], [2.0, 2.0]))
    assert expected(pools, prompt("c")) == [5 / 8]
    step(pools, [prompt("c")], tensor([0.0, 0.0]), tensor([1.0, 1.0]))
    assert expected(pools, prompt("d")) == [pytest.approx(2.5 / 6)]


def test_each_source_has_its_own_pool_and_a_new_one_begins_with_all() -> None:
    pools = make()
    step(pools, [prompt("a"), prompt("b", "hard")], tensor([1.0], [0.0]), tensor([1.0], [3.0]))
    found = expected(pools, prompt("c"), prompt("c", "hard"), prompt("c", "new"))
    assert found == [1.0, 0.0, 0.25]


def test_a_source_for_each_row_does_not_fill_the_log() -> None:
    """The first by name are logged, whichever is larger in a step, also after a resume, in another order."""
    pools = make()
    prompts = [prompt("a", f"https://{number}") for number in range(40)]
    step(pools, prompts, torch.ones(40, 1), torch.arange(1.0, 41.0)[:, None])
    first = {f"pool/{prompt.source}/mean" for prompt in sorted(prompts, key=lambda one: one.source)[:16]}
    assert set(pools.metrics()) == first | {"pool/effective_samples"}
    same, reordered = make(baseline="pooled_mean"), make(baseline="pooled_mean")
    step(same, prompts, torch.ones(40, 1), torch.ones(40, 1))
    reordered.load_state_dict(json.loads(json.dumps(same.state_dict(), sort_keys=True)))
    assert set(same.metrics()) == set(reordered.metrics()) and len(same.metrics()) == 16


def test_one_large_norm_leaves_one_effective_response() -> None:
    pools = make()
    for norms, wanted in ((tensor([1.0, 1.0], [1.0, 1.0]), 4.0), (tensor([1e6, 1.0], [1.0, 0.0]), 1.0)):
        step(pools, [prompt("a"), prompt("b")], tensor([1.0, 0.0], [0.0, 1.0]), norms)
        assert pools.metrics()["pool/effective_samples"] == pytest.approx(wanted, rel=1e-5)


def test_plain_pools_ignore_the_norms() -> None:
    pools = make(baseline="pooled_mean")
    step(pools, [prompt("a")], tensor([1.0, 0.0, 0.0, 0.0]), tensor([9.0, 0.0, 0.0, 0.0]))
    assert expected(pools, prompt("b")) == [0.25]


@pytest.mark.parametrize("weight", [0.0, math.nan, math.inf])
def test_a_response_without_a_norm_is_left_out(weight: float) -> None:
    pools = make()
    step(pools, [prompt("a"), prompt("b")], tensor([1.0, 0.0], [1.0, 1.0]), tensor([2.0, weight], [weight, weight]))
    assert expected(pools, prompt("c")) == [1.0]
    assert set(pools.state_dict()["prompts"]) == {"sums/a"}


def test_the_pull_is_the_least_squares_weight_of_earlier_steps() -> None:
    pools, random = make(baseline="optimal_pooled"), torch.Generator().manual_seed(3)
    prompts = [prompt(name) for name in "abcdefgh"]

    def any_step() -> tuple[Tensor, Tensor]:
        weights = torch.rand(8, 4, generator=random, dtype=torch.float64)
        rates = torch.tensor([[0.2], [0.8]]).repeat(4, 1)
        return (torch.rand(8, 4, generator=random) < rates).double(), weights

    step(pools, prompts, *any_step())
    assert pools.history(prompts).pull == 0, "the first step has no pool to be pulled to"
    known = pools.history(prompts).expected
    assert known is not None
    rewards, weights = any_step()
    own = mean_of_others(rewards, weights)
    away = known[:, None] - own
    step(pools, prompts, rewards, weights)
    alpha = float((weights * (rewards - own) * away).sum() / (weights * away**2).sum())
    assert 0 < alpha < 1, "not clamped"
    assert pools.history(prompts).pull == pytest.approx(alpha, rel=1e-12)


def test_the_state_survives_json_to_the_bit() -> None:
    pools, random = make(baseline="optimal_pooled"), torch.Generator().manual_seed(1)
    prompts = [prompt(name, source) for name in "abc" for source in ("easy", "hard")]

    def any_step() -> tuple[Tensor, Tensor]:
        return torch.rand(6, 3, generator=random, dtype=torch.float64), torch.rand(6, 3, generator=random).double()

    for _ in range(3):
        step(pools, prompts, *any_step())
    taken = pools.state_dict()
    before = json.dumps(taken)
    copy = make(baseline="optimal_pooled")
    copy.load_state_dict(json.loads(json.dumps(pools.state_dict())))
    values = any_step()
    for each in (pools, copy):
        step(each, prompts, *values)
    assert copy.state_dict() == pools.state_dict()
    assert json.dumps(taken) == before, "a checkpoint is written while the next step runs"
    assert copy.history(prompts).expected.equal(pools.history(prompts).expected)  # type: ignore[union-attr]


@pytest.mark.parametrize(("spread", "better"), [(0.3, 0.5), (0.0, 1.2)])
def test_a_prompts_own_history_helps_where_prompts_differ_and_does_no_harm_where_not(
    spread: float, better: float
) -> None:
    """Squared error of b_t for the prompt's true mean, relative to that of the pool alone."""
    random = torch.Generator().manual_seed(4)
    true = 0.5 + spread * (torch.arange(32) % 2 * 2 - 1).double()  # pass rates of two kinds of prompts
    prompts = [prompt(str(k)) for k in range(32)]
    pools = make(baseline="pooled_mean", pool_decay=0.9)
    own, pool = 0.0, 0.0
    for number in range(30):
        if number >= 10:
            own += float((pools.history(prompts).expected - true).square().sum())  # type: ignore[operator]
            pool += float((torch.tensor(expected(pools, prompt("new"))[0]) - true).square().sum())
        rewards = (torch.rand(32, 2, generator=random) < true[:, None]).double()
        step(pools, prompts, rewards, torch.ones(32, 2))
    assert own < better * pool


def test_sums_of_other_weights_are_not_continued() -> None:
    """A run that goes on with another baseline begins with empty pools: its weights have another unit."""
    plain = make(baseline="pooled_mean")
    step(plain, [prompt("a")], tensor([1.0]), tensor([3.0]))
    for baseline, known in (("pooled", False), ("pooled_mean", True)):
        later = make(baseline=baseline)
        later.load_state_dict(plain.state_dict())
        assert math.isnan(expected(later, prompt("b"))[0]) is not known


def test_a_step_without_any_norm_leaves_the_pools_as_they_are() -> None:
    """Also with pool_decay = 0, where only the last step counts: the usual norm would be 0 / 0."""
    pools, prompts = make(pool_decay=0.0), [prompt("a"), prompt("b")]
    step(pools, prompts, tensor([1.0], [0.0]), tensor([1.0], [3.0]))
    step(pools, prompts, tensor([1.0], [1.0]), tensor([0.0], [float("nan")]))
    assert expected(pools, *prompts) == [0.25, 0.25]
    step(pools, prompts, tensor([0.75], [0.0]), tensor([2.0], [2.0]))
    assert all(math.isfinite(value) for value in expected(pools, *prompts))


def test_only_pooled_baselines_have_pools() -> None:
    assert pools_of(AlgoConfig(baseline="rloo")) is None and pools_of(AlgoConfig(baseline="pooled")) is not None
    assert NO_HISTORY.expected is None


@pytest.mark.parametrize("rates", [(0.2, 0.8), (0.9, 0.9), (0.5, *(0.98,) * 7)])
def test_a_history_of_few_responses_does_not_replace_the_weighted_pool(rates: tuple[float, ...]) -> None:
    """Right answers have tiny norms, so that a response's plain reward is far from E[w r] / E[w].

    Errors w (r - b)^2 relative to those of the pool alone.
    """
    random = torch.Generator().manual_seed(5)
    prompts, pools = [prompt(str(k)) for k in range(64)], make(pool_decay=0.9)
    true = torch.tensor(rates).repeat(64 // len(rates))[:, None]
    own, pool = 0.0, 0.0
    for number in range(40):
        rewards = (torch.rand(64, 1, generator=random) < true).double()
        weights = torch.where(rewards > 0, 0.003, 1.0) * (0.5 + torch.rand(64, 1, generator=random)).double()
        if number >= 5:
            predicted = pools.history(prompts).expected
            assert predicted is not None
            own += float((weights * (rewards - predicted[:, None]) ** 2).sum())
            pool += float((weights * (rewards - expected(pools, prompt("new"))[0]) ** 2).sum())
        step(pools, prompts, rewards, weights)
    assert own < 1.02 * pool


def test_a_history_counts_with_the_norms_that_it_rests_on() -> None:
    """Two steps of two prompts by hand: x = D / (D + wbar) (h - b), beta from the second step."""
    pools = make(pool_decay=0.0)
    prompts = [prompt("a"), prompt("b")]
    step(pools, prompts, tensor([1.0], [0.0]), tensor([1.0], [3.0]))  # b = 1/4, wbar = 2
    assert expected(pools, *prompts) == [0.25, 0.25], "nothing says yet that histories predict anything"
    step(pools, prompts, tensor([0.75], [0.0]), tensor([2.0], [2.0]))
    away = [1 / 3 * 0.75, 3 / 5 * -0.25]
    beta = (2 * 0.5 * away[0] + 2 * -0.25 * away[1]) / (2 * away[0] ** 2 + 2 * away[1] ** 2)
    assert beta > 1, "so that it is cut to 1"
    pool = 0.375  # pool_decay = 0: of the second step alone, and so are the histories and wbar = 2
    assert expected(pools, *prompts) == pytest.approx([pool + 0.5 * 0.375, pool - 0.5 * 0.375])
