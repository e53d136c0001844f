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


def stats_of_steps(toy, name: str) -> list[GradientStats]:
    """Statistics of many steps at one policy, every prompt a fold."""
    random = torch.Generator().manual_seed(1)
    kinds = torch.randint(len(toy.probs), (STEPS, Q), generator=random)
    picks = torch.multinomial(toy.probs[kinds].flatten(0, 1), G, replacement=True, generator=random)  # [S Q, G]
    kinds = kinds.flatten()
    rewards, norms, lengths = (t[kinds].gather(1, picks) for t in (toy.rewards, toy.norms_sq, toy.lengths))
    history = History(torch.full((len(kinds),), 0.3, dtype=torch.float64))
    advantage = advantages(name, rewards, norms, lengths, history)
    scores = toy.scores[kinds[:, None], picks]  # [S Q, G, D]
    of_prompts = torch.einsum("pg,pgd->pd", advantage, scores).view(STEPS, Q, -1) / G
    whole = of_prompts.mean(1).square().sum(-1).tolist()
    folds = of_prompts.square().sum(-1).mean(1).tolist()
    terms = ((advantage / (Q * G)) ** 2 * norms).view(STEPS, -1).sum(1).tolist()
    return [
        GradientStats(0.0, sq_norm, of_folds, Q, 0.0, 0.0, 0.0, 1, sample_sq_norm=squares)
        for sq_norm, of_folds, squares in zip(whole, folds, terms, strict=True)
    ]


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
    ("options", "size"),
    [
        ({"baseline": "rloo"}, 1),
        ({"baseline": "grpo"}, 4),
        ({"baseline": "group_mean"}, 4),
        ({"baseline": "rloo", "aggregation": "token_mean"}, 4),
        ({"baseline": "rloo", "kl_coefficient": 0.1}, 4),
        ({"baseline": "optimal_pooled"}, 4),
    ],
)
def test_it_is_left_out_where_it_is_not_defined(toy, options: dict[str, Any], size: int) -> None:
    split = NoiseSplit(AlgoConfig.model_validate(options), Q, size)
    split.observe(stats_of_steps(toy, "rloo")[0])
    assert split.metrics() == {}


@pytest.mark.parametrize("reason", ["", "router_losses", "chosen"])
def test_it_is_left_out_with_a_router_loss_or_chosen_groups(toy, reason: str) -> None:
    split = NoiseSplit(AlgoConfig(baseline="rloo"), Q, G, **({reason: True} if reason else {}))
    split.observe(stats_of_steps(toy, "rloo")[0])
    assert bool(split.metrics()) is not bool(reason)


def test_a_step_without_norms_or_folds_is_left_out() -> None:
    split = NoiseSplit(AlgoConfig(baseline="rloo"), Q, G)
    split.observe(GradientStats(0.0, 1.0, 2.0, 1, 0.0, 0.0, 0.0, 1, sample_sq_norm=0.1))
    split.observe(GradientStats(0.0, 1.0, 2.0, 4, 0.0, 0.0, 0.0, 1))
    assert split.metrics() == {} and math.isnan(split.best_group_size)


def test_the_state_survives_json(toy) -> None:
    split, copy = (NoiseSplit(AlgoConfig(baseline="rloo"), Q, G) for _ in range(2))
    stats = stats_of_steps(toy, "rloo")[:9]
    for each in stats[:8]:
        split.observe(each)
    copy.load_state_dict(json.loads(json.dumps(split.state_dict())))
    for each in (split, copy):
        each.observe(stats[8])
    assert copy.metrics() == split.metrics() != {}


def test_averages_of_an_earlier_configuration_are_not_logged(toy) -> None:
    split, other = NoiseSplit(AlgoConfig(baseline="rloo"), Q, G), NoiseSplit(AlgoConfig(baseline="none"), Q, G)
    step = stats_of_steps(toy, "rloo")[0]
    split.observe(step)
    other.load_state_dict(split.state_dict())
    assert other.state_dict()["weight"] == 0
    split.observe(replace(step, sample_sq_norm=math.nan))
    assert split.metrics() == {}, "norms are no longer measured"
    split.observe(step)
    assert split.metrics()


@pytest.mark.parametrize("changed", [{"norm_power": 0.25}, {"keep": 0.5}])
def test_averages_of_another_estimator_are_ignored(toy, changed: dict[str, float]) -> None:
    """Also those of a checkpoint that does not say what they are of."""
    split, other = (NoiseSplit(AlgoConfig(baseline="pooled", **more), Q, G) for more in ({}, changed))
    split.observe(stats_of_steps(toy, "rloo")[0])
    state = split.state_dict()
    assert state["weight"] > 0
    for each in (state, {name: state[name] for name in state if name not in changed}):
        other.load_state_dict(each)
        assert other.state_dict()["weight"] == 0


@pytest.mark.parametrize(("num_prompts", "size"), [(2 * Q, G), (Q, 2 * G)])
def test_a_run_with_another_batch_begins_with_no_averages(toy, num_prompts: int, size: int) -> None:
    split, other = (NoiseSplit(AlgoConfig(baseline="rloo"), *of) for of in ((Q, G), (num_prompts, size)))
    split.observe(stats_of_steps(toy, "rloo")[0])
    other.load_state_dict(split.state_dict())
    assert other.metrics() == {} and other.state_dict()["weight"] == 0
