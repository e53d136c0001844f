"""Each estimator on batches with known signal and noise: unbiased, or biased as its docstring says.

Not covered: folds, norms and averages from a run (tests/distributed), exact moments of fold estimates (test_snr.py).
"""

from __future__ import annotations

import math
import statistics
from functools import cache

import pytest
import torch
from torch import Tensor

from oblr_megatron.algo.snr import ESTIMATORS, SnrAverages
from oblr_megatron.config.algo import SnrConfig
from oblr_megatron.types import GradientStats

Q, G, SIZE, STEPS, BLOCK = 16, 4, 40, 2000, 50
SHARED, OWN = 0.5, 1.5  # standard deviations: shared by a prompt's responses, and of each response
HORIZON = 10


def responses(step: int, signal: float) -> Tensor:
    """[Q, G, D] the responses' terms of one batch's gradient; the squared norm of their mean is `signal`."""
    random = torch.Generator().manual_seed(step)
    shared = SHARED * torch.randn(Q, 1, SIZE, generator=random, dtype=torch.float64)
    own = OWN * torch.randn(Q, G, SIZE, generator=random, dtype=torch.float64)
    return math.sqrt(signal / SIZE) + shared + own


NOISE = SIZE * (SHARED**2 + OWN**2 / G)
"""tr(H), for the mean of G responses."""


@cache
def simulated(signal: float) -> dict[int, list[GradientStats]]:
    """The statistics of a run of STEPS steps, by the number of folds."""
    found: dict[int, list[GradientStats]] = {1: [], 4: [], Q: []}
    average = torch.zeros(SIZE, dtype=torch.float64)
    for step in range(STEPS):
        terms = responses(step, signal)
        gradient = terms.mean((0, 1))
        dot = float(gradient @ average) / (1 - (1 - 1 / HORIZON) ** step) if step else math.nan
        sq_norm, squares = float(gradient @ gradient), float((terms / (Q * G)).square().sum())
        for num_folds, stats in found.items():
            folds = terms.mean(1).unflatten(0, (num_folds, -1)).mean(1)
            of_folds = float(folds.square().sum(1).mean())
            own = GradientStats(0.0, sq_norm, of_folds, num_folds, 0, 0, 0, 1)
            own.momentum_dot, own.sample_sq_norm = dot, squares
            stats.append(own)
        average += (gradient - average) / HORIZON
    return found


def mean_and_bound(values: list[float]) -> tuple[float, float]:
    """The mean and four standard errors, from blocks that are longer than the correlation between steps."""
    blocks = torch.tensor(values[len(values) % BLOCK :], dtype=torch.float64).view(-1, BLOCK).mean(1)
    return float(blocks.mean()), 4 * float(blocks.std()) / len(blocks) ** 0.5


@pytest.mark.parametrize("signal", [0.0, 0.5, 5.0])
@pytest.mark.parametrize(("name", "num_folds"), [("folds", 4), ("prompts", Q), ("momentum", 1)])
def test_unbiased(name: str, num_folds: int, signal: float) -> None:
    estimates = [ESTIMATORS[name](stats, Q) for stats in simulated(signal)[num_folds]]
    estimates = [estimate for estimate in estimates if estimate.defined]
    assert len(estimates) >= STEPS - 1
    for values, truth in (
        ([estimate.signal for estimate in estimates], signal),
        ([estimate.noise for estimate in estimates], NOISE),
        ([estimate.second_moment for estimate in estimates], signal + NOISE / Q),
    ):
        mean, bound = mean_and_bound(values)
        assert abs(mean - truth) < bound < 0.1 * NOISE, (mean, truth, bound)


def test_momentum_has_the_least_spread_and_more_folds_have_less() -> None:
    spread = {
        (name, folds): statistics.stdev(ESTIMATORS[name](stats, Q).signal for stats in simulated(0.5)[folds][1:])
        for name, folds in (("folds", 4), ("prompts", Q), ("momentum", 1))
    }
    assert spread["momentum", 1] < 0.6 * spread["prompts", Q]
    assert spread["folds", 4] == pytest.approx(1.12 * spread["prompts", Q], rel=0.05)


def test_samples_count_noise_shared_by_a_prompts_responses_as_signal() -> None:
    """The bias is ((G - 1) / G (signal + shared) - signal) / Q, as in the docstring."""
    signal = 0.5
    mean, bound = mean_and_bound([ESTIMATORS["samples"](stats, Q).signal for stats in simulated(signal)[4]])
    bias = ((G - 1) / G * (signal + SIZE * SHARED**2) - signal) / Q
    assert abs(mean - (signal + bias)) < bound
    assert mean > signal + 2 * bound, "the bias is larger than the standard error"


def test_plugin_is_near_one_half_under_pure_noise() -> None:
    """The folds give 0."""
    averages = {
        name: SnrAverages(SnrConfig(estimator=name, horizon=1e9, floor=1e-9), Q) for name in ("plugin", "folds")
    }
    for stats in simulated(0.0)[4]:
        for average in averages.values():
            average.observe(stats)
    assert averages["plugin"].shrink == pytest.approx(0.5, abs=0.01)
    assert abs(averages["folds"].signal / averages["folds"].sq_norm) < 0.02
    assert averages["plugin"].noise == pytest.approx(NOISE, rel=0.02)


def test_momentum_of_a_constant_gradient_is_exact() -> None:
    """<g, m> = ||g||^2: all signal, no noise."""
    estimate = ESTIMATORS["momentum"](GradientStats(0.0, 3.0, 0.0, 1, 0, 0, 0, 1, momentum_dot=3.0), Q)
    assert (estimate.signal, estimate.noise, estimate.shrink_raw) == (3.0, 0.0, 1.0)


@pytest.mark.parametrize("name", ["momentum", "samples"])
@pytest.mark.parametrize("sq_norm", [0.0, 1.0, math.inf, math.nan])
def test_missing_measurements_give_an_undefined_estimate(name: str, sq_norm: float) -> None:
    stats = GradientStats(0.0, sq_norm, 0.0, 1, 0, 0, 0, 1)
    assert not ESTIMATORS[name](stats, Q).defined
    assert not SnrAverages(SnrConfig(estimator=name), Q).observe(stats)
