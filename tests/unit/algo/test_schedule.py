"""Learning rates step by step: warm-up, lag, floor, rate limit, shrink_ref, hold, resume.

Not covered: whether a schedule trains better; studies measure that.
"""

from __future__ import annotations

import json
import math
import random

import pytest

from oblr_megatron.algo.schedule import build_schedule
from oblr_megatron.algo.snr import SnrAverages, noise_settings
from oblr_megatron.config import OptimizerConfig
from oblr_megatron.config.algo import AlgoConfig, SnrConfig
from oblr_megatron.types import GradientStats

LR = 2e-3


def stats(shrink: float, folds: int = 4) -> GradientStats:
    """B = 1 and a signal of `shrink`, so that shrink_raw is `shrink`."""
    return GradientStats(0.0, 1.0, folds - shrink * (folds - 1), folds, 0.0, 0.0, 0.0, 1)


EMPTY = GradientStats(0.0, 0.0, 0.0, 4, 0.0, 0.0, 0.0, 0)  # a step without any active group


def build(schedule: str = "snr", optimizer: str = "sgd", num_steps: int = 100, **snr):
    config = AlgoConfig(schedule=schedule, snr=SnrConfig(**{"max_change": 1e9, "warmup_steps": 0, **snr}))
    return build_schedule(config, OptimizerConfig(lr=LR, name=optimizer), num_steps=num_steps, num_prompts=8)


def run(schedule, shrinks, start: int = 0) -> list[float]:
    """Rates / lr of the steps; each step's shrink is observed after its rate was read."""
    rates = []
    for step, shrink in enumerate(shrinks, start):
        rates.append(schedule.rate(step) / LR)
        schedule.observe(EMPTY if shrink is None else stats(shrink))
    return rates


def test_constant_stays_and_still_estimates():
    schedule = build("constant")
    assert run(schedule, [0.5] * 3) == [1.0] * 3
    assert schedule.metrics()["snr/shrink_ema"] == pytest.approx(0.5)


def test_cosine_goes_from_lr_to_its_share_at_the_last_step():
    rates = run(build("cosine", num_steps=5), [0.5] * 7)
    assert rates == pytest.approx([1.0, 0.1 + 0.9 * (2 + math.sqrt(2)) / 4, 0.55, rates[3], 0.1, 0.1, 0.1])
    assert run(build("cosine", num_steps=1), [0.5]) == [1.0]


@pytest.mark.parametrize("name", ["constant", "cosine", "snr"])
def test_rates_rise_over_the_warm_up(name):
    algo = AlgoConfig(schedule=name, snr=SnrConfig(warmup_steps=0))
    ramped, plain = (
        build_schedule(algo, OptimizerConfig(lr=LR, lr_warmup_steps=steps), num_steps=9, num_prompts=8)
        for steps in (4, 0)
    )
    ratios = [a / b for a, b in zip(run(ramped, [0.3] * 6), run(plain, [0.3] * 6), strict=True)]
    assert ratios == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


# name -> options of the schedule "snr", shrinks, rates / lr
BY_HAND = {
    "the paper's rule": ({"reference": "one", "horizon": 1}, [0.5, 0.25, 0.8, 0.4], [1, 0.5, 0.25, 0.8]),
    "adam takes the root": (
        {"optimizer": "adam", "reference": "one", "horizon": 1}, [0.25, 0.64, 0.1], [1, 0.5, 0.8]
    ),
    "a given exponent": (
        {"optimizer": "adam", "reference": "one", "horizon": 1, "exponent": 2.0}, [0.5, 1], [1, 0.25]
    ),
    "after the warm-up the mean of four": (
        {"warmup_steps": 4, "reference": "one", "horizon": 1e9}, [0.1, 0.2, 0.3, 0.4, 0.5], [1, 1, 1, 1, 0.25]
    ),
    "the reference is of the end of warm-up": (
        {"warmup_steps": 2, "horizon": 1}, [0.9, 0.2, 0.4, 0.1, 0.2], [1, 1, 1, 2, 0.5]
    ),
    "without warm-up the first estimate": ({"horizon": 1}, [0.4, 0.2, 0.4], [1, 1, 0.5]),
    "the reference waits for as many estimates": (
        {"warmup_steps": 2, "horizon": 1}, [None, None, 0.4, 0.2, 0.1, 0.1], [1, 1, 1, 1, 1, 0.5]
    ),
    "the floor": ({"reference": "one", "horizon": 1, "floor": 0.3}, [-2.0, 0.1, 0.5, 0.5], [1, 0.3, 0.3, 0.5]),
    "changes by at most the limit": (
        {"reference": "one", "horizon": 1, "max_change": 1.1},
        [0.2] * 4 + [1.0] * 6,
        [*(1.1**-k for k in range(5)), *(1.1 ** (k - 4) for k in range(1, 5)), 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_rates_by_hand(case):
    options, shrinks, rates = BY_HAND[case]
    assert run(build(**options), shrinks) == pytest.approx(rates)


def test_a_rate_does_not_depend_on_its_own_gradient():
    rates = []
    for last in (0.1, 0.9):
        schedule = build(reference="one", horizon=3)
        rates.append(run(schedule, [0.4, 0.6, last]))
        assert schedule.rate(2) == rates[-1][2] * LR  # unchanged after its gradient was observed
    assert rates[0] == rates[1]


def test_observe_before_rate_is_refused():
    schedule = build()
    with pytest.raises(AssertionError, match="before rate"):
        schedule.observe(stats(0.5))
    run(schedule, [0.5])
    with pytest.raises(AssertionError, match="before rate"):
        schedule.observe(stats(0.5))


def test_the_floor_clamps_after_averaging():
    rates = run(build(reference="one", horizon=1e9, floor=0.3), [-0.4, 1.0, 1.0, 1.0])
    assert rates[2:] == pytest.approx([0.3, 1.6 / 3])


@pytest.mark.parametrize("undefined", [EMPTY, stats(0.0, folds=1)], ids=["no active group", "one fold"])
def test_the_rate_holds_on_a_step_without_an_estimate(undefined):
    schedule = build(reference="one", horizon=1, max_change=1.1)
    run(schedule, [0.2, 0.2])
    held = schedule.rate(2)
    schedule.observe(undefined)
    assert schedule.rate(3) == held
    assert schedule.rate(4) == held  # step 3 was never observed
    schedule.observe(stats(0.2))
    moved = schedule.rate(5)
    assert moved == pytest.approx(held / 1.1)
    assert schedule.rate(6) == moved  # step 5 was never observed


@pytest.mark.parametrize("size", [1, 8])
def test_averages_of_another_group_size_begin_again(size):
    """One prompt's noise depends on G. The rate stays for warmup_steps steps, and moves after them."""
    algo = AlgoConfig(schedule="snr", snr=SnrConfig(warmup_steps=3, horizon=50))
    settings = {"num_steps": 40, "num_prompts": 8}
    before = build_schedule(algo, OptimizerConfig(lr=LR), group_size=8, **settings)
    run(before, [0.8] * 10)
    after = build_schedule(algo, OptimizerConfig(lr=LR), group_size=size, **settings)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    again = build_schedule(algo, OptimizerConfig(lr=LR), group_size=size, **settings)
    again.load_state_dict(json.loads(json.dumps(after.state_dict())))
    factors = run(again, [0.2] * 5, start=10)
    assert (factors[:3] == [factors[0]] * 3) is (size == 1) and factors[3] < factors[0]
    critical = again.metrics()["snr/critical_batch_size"]
    assert critical == pytest.approx(8 * (1 - 0.2) / 0.2) if size == 1 else critical < 20


@pytest.mark.parametrize("name", ["constant", "cosine", "snr"])
@pytest.mark.parametrize("broken_at", [1, 3, 4, 9])
def test_a_resumed_schedule_is_the_unbroken_one(name, broken_at):
    source = random.Random(1)
    shrinks = [source.uniform(-0.2, 0.8) for _ in range(20)]
    shrinks[8] = None
    options = {"warmup_steps": 3, "horizon": 5, "max_change": 1.1}
    unbroken = run(build(name, **options), shrinks)
    first, second = build(name, **options), build(name, **options)
    rates = run(first, shrinks[:broken_at])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert rates + run(second, shrinks[broken_at:], broken_at) == unbroken


def test_averages_under_another_reward_begin_again():
    averages = [SnrAverages(SnrConfig(), 4, noise_settings(AlgoConfig(), 8, scores)) for scores in ("a", "b", "a")]
    averages[0].observe(stats(0.5))
    for other, count in zip(averages[1:], (0, 1), strict=True):
        other.load_state_dict(averages[0].state_dict())
        assert other.count == count
