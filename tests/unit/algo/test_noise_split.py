"""The split of the noise, estimated from drawn steps of a small policy, equals the exact variances.

Not covered: language models; norms that are not exact.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from oblr_megatron.algo.baseline import advantages
from oblr_megatron.algo.formulas import History
from oblr_megatron.algo.noise_split import MEANS, NoiseSplit
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.types import GradientStats

Q, G, STEPS = 8, 3, 3000
BASELINES = ["rloo", "none", "pooled_mean", "optimal"]


def stats_of_steps(toy, name: str, num_steps: int = STEPS) -> list[GradientStats]:
    """Statistics of many steps at one policy, every prompt a fold."""
    random = torch.Generator().manual_seed(1)
    kinds = torch.randint(len(toy.probs), (num_steps, Q), generator=random)
    picks = torch.multinomial(toy.probs[kinds].flatten(0, 1), G, replacement=True, generator=random)  # [S Q, G]
    kinds = kinds.flatten()
    rewards, norms, lengths = (t[kinds].gather(1, picks) for t in (toy.rewards, toy.norms_sq, toy.lengths))
    history = History(torch.full((len(kinds),), 0.3, dtype=torch.float64))
    advantage = advantages(name, rewards, norms, lengths, history)
    scores = toy.scores[kinds[:, None], picks]  # [S Q, G, D]
    of_prompts = torch.einsum("pg,pgd->pd", advantage, scores).view(num_steps, Q, -1) / G
    whole = of_prompts.mean(1).square().sum(-1).tolist()
    folds = of_prompts.square().sum(-1).mean(1).tolist()
    terms = ((advantage / (Q * G)) ** 2 * norms).view(num_steps, -1).sum(1).tolist()
    return [
        GradientStats(0.0, sq_norm, of_folds, Q, 0.0, 0.0, 0.0, 1, sample_sq_norm=squares)
        for sq_norm, of_folds, squares in zip(whole, folds, terms, strict=True)
    ]


@pytest.fixture(scope="module")
def steps(toy) -> list[GradientStats]:
    return stats_of_steps(toy, "rloo", 9)


@pytest.mark.parametrize("name", BASELINES)
def test_both_parts_are_the_exact_variances(toy, name: str) -> None:
    split = NoiseSplit(AlgoConfig(baseline=name, snr={"horizon": 1e6}), Q, G)
    stats = stats_of_steps(toy, name)
    for each in stats:
        split.observe(each)
    found = split.metrics()
    mean = toy.gradients.mean(0)
    between = float((toy.gradients - mean).square().sum(-1).mean())
    noise = Q / (Q - 1) * sum(each.fold_sq_norm_mean - each.sq_norm for each in stats) / STEPS
    assert found["snr/between"] == pytest.approx(between, rel=0.1)
    assert found["snr/within"] == pytest.approx(noise - between, rel=0.1)
    within = found["snr/within"] * (G - 1)
    wanted = 1 + math.sqrt(within / found["snr/between"]) if name in MEANS else 1.0
    assert found["snr/best_group_size"] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("options", "size", "run"),
    [
        ({}, 1, {}),
        ({"baseline": "grpo"}, 4, {}),
        ({"baseline": "group_mean"}, 4, {}),
        ({"aggregation": "token_mean"}, 4, {}),
        ({"kl_coefficient": 0.1}, 4, {}),
        ({"baseline": "optimal_pooled"}, 4, {}),
        ({}, 4, {"router_losses": True}),
        ({}, 4, {"chosen": True}),
    ],
)
def test_it_is_left_out_where_it_is_not_defined(steps, options: dict[str, Any], size: int, run: dict[str, Any]) -> None:
    split = NoiseSplit(AlgoConfig.model_validate({"baseline": "rloo"} | options), Q, size, **run)
    split.observe(steps[0])
    assert split.metrics() == {}


def test_a_step_without_norms_or_folds_is_left_out() -> None:
    split = NoiseSplit(AlgoConfig(baseline="rloo"), Q, G)
    split.observe(GradientStats(0.0, 1.0, 2.0, 1, 0.0, 0.0, 0.0, 1, sample_sq_norm=0.1))
    split.observe(GradientStats(0.0, 1.0, 2.0, 4, 0.0, 0.0, 0.0, 1))
    assert split.metrics() == {} and math.isnan(split.best_group_size)


def test_the_state_survives_json(steps) -> None:
    split, copy = (NoiseSplit(AlgoConfig(baseline="rloo"), Q, G) for _ in range(2))
    for each in steps[:8]:
        split.observe(each)
    copy.load_state_dict(json.loads(json.dumps(split.state_dict())))
    for each in (split, copy):
        each.observe(steps[8])
    assert copy.metrics() == split.metrics() != {}


def test_averages_are_not_logged_once_norms_are_no_longer_measured(steps) -> None:
    split = NoiseSplit(AlgoConfig(baseline="rloo"), Q, G)
    split.observe(steps[0])
    split.observe(replace(steps[0], sample_sq_norm=math.nan))
    assert split.metrics() == {}
    split.observe(steps[0])
    assert split.metrics()


@pytest.mark.parametrize(
    ("changed", "batch"),
    [
        ({"baseline": "none"}, (Q, G)),
        ({"norm_power": 0.25}, (Q, G)),
        ({"keep": 0.5}, (Q, G)),
        ({"kl_coefficient": 0.1}, (Q, G)),
        ({}, (2 * Q, G)),
        ({}, (Q, 2 * G)),
    ],
)
def test_averages_of_another_estimator_or_batch_are_ignored(steps, changed: dict[str, Any], batch: Any) -> None:
    """Also those of a checkpoint that does not say what they are of."""
    split = NoiseSplit(AlgoConfig(baseline="pooled"), Q, G)
    other = NoiseSplit(AlgoConfig(**{"baseline": "pooled"} | changed), *batch)
    split.observe(steps[0])
    state = split.state_dict()
    assert state["weight"] > 0
    for each in (state, {name: state[name] for name in state if name not in changed}):
        other.load_state_dict(each)
        assert other.state_dict()["weight"] == 0 and other.metrics() == {}
