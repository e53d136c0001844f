"""Signal and noise: exact moments by enumeration, and their averages.

Not covered: fold gradients from a model; pure noise (test_snr_estimators.py).
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from oblr_megatron.algo.baseline import advantages
from oblr_megatron.algo.snr import SnrAverages, folds
from oblr_megatron.config.algo import SnrConfig
from oblr_megatron.types import GradientStats


def stats(sq_norm: float, fold_sq_norm_mean: float, num_folds: int = 4) -> GradientStats:
    return GradientStats(0.0, sq_norm, fold_sq_norm_mean, num_folds, 0.0, 0.0, 0.0, 1)


def fold_estimate(sq_norm: float, fold_sq_norm_mean: float, num_folds: int, num_prompts: int):
    return folds(stats(sq_norm, fold_sq_norm_mean, num_folds), num_prompts)


def averages_over(horizon: float, num_prompts: int = 8, **options: Any) -> SnrAverages:
    return SnrAverages(SnrConfig(horizon=horizon, **options), num_prompts)


def moments(folds: torch.Tensor) -> tuple[float, float]:
    """B and M of fold gradients [R, D]."""
    return float(folds.mean(0).square().sum()), float(folds.square().sum(-1).mean())


@pytest.mark.parametrize("folds", [2, 4])
def test_unbiased_by_enumeration(toy, folds):
    """Q = 4 prompts drawn from two, with a pair of responses each: all 32^4 batches."""
    outcomes, probs = [], []
    for prompt in range(2):
        picks, p = toy.groups(prompt, 2)
        values = (tensor[prompt][picks] for tensor in (toy.rewards, toy.norms_sq, toy.lengths))
        advantage = advantages("optimal", *values)
        outcomes.append(torch.einsum("eg,egd->ed", advantage, toy.scores[prompt][picks]) / 2)
        probs.append(p / 2)
    outcomes, probs = torch.cat(outcomes), torch.cat(probs)  # [32, D], [32]
    mean = probs @ outcomes
    trace = float(probs @ (outcomes - mean).square().sum(-1))
    batches = torch.cartesian_prod(*[torch.arange(32)] * 4)
    weights = probs[batches].prod(-1)
    folded = outcomes[batches].unflatten(1, (folds, 4 // folds)).mean(2)  # [E, R, D]
    sq_norm = float(weights @ folded.mean(1).square().sum(-1))
    fold_sq_norm_mean = float(weights @ folded.square().sum(-1).mean(-1))
    estimate = fold_estimate(sq_norm, fold_sq_norm_mean, folds, 4)  # linear in B and M, so means suffice
    assert estimate.signal == pytest.approx(float(mean.square().sum()), rel=1e-10)
    assert estimate.noise == pytest.approx(trace, rel=1e-10)


@pytest.mark.parametrize(
    ("sq_norm", "mean", "folds"),
    [(1.0, 1.0, 1), (0.0, 0.0, 4), (math.inf, math.inf, 4), (math.nan, 1.0, 4), (1.0, math.inf, 4)],
)
def test_an_undefined_estimate_leaves_the_averages_unchanged(sq_norm, mean, folds):
    averages = averages_over(10)
    averages.observe(stats(1.0, 2.0))
    before = averages.state_dict()
    assert not averages.observe(stats(sq_norm, mean, folds))
    assert averages.state_dict() == before
    assert set(averages.metrics()) == {"snr/shrink_ema", "snr/snr", "snr/critical_batch_size"}  # of the averages


def test_averages_are_bias_corrected_and_divided_last():
    averages, decay = averages_over(4), 0.75
    values = [(1.0, 3.0), (2.0, 2.5), (0.5, 1.0)]
    for sq_norm, mean in values:
        averages.observe(stats(sq_norm, mean))
    weights = [decay**2, decay, 1.0]
    signals = [fold_estimate(b, m, 4, 8).signal for b, m in values]
    signal = sum(w * x for w, x in zip(weights, signals, strict=True)) / sum(weights)
    sq_norm = sum(w * b for w, (b, _) in zip(weights, values, strict=True)) / sum(weights)
    assert averages.signal == pytest.approx(signal, rel=1e-14)
    assert averages.sq_norm == pytest.approx(sq_norm, rel=1e-14)
    assert averages.shrink == pytest.approx(signal / sq_norm, rel=1e-14)


def test_shrink_is_clamped_after_averaging():
    averages = averages_over(1e9)
    for mean, want in ((5.5, 0.1), (1.0, 0.25), (-20.0, 1.0)):  # shrinks of -0.5, 1 and 8 (only to test the clamp)
        averages.observe(stats(1.0, mean))
        assert averages.shrink == pytest.approx(want)


def test_averages_without_an_observation_are_undefined():
    assert math.isnan(averages_over(4).shrink) and averages_over(4).metrics() == {}


def test_metrics_of_one_step():
    averages = averages_over(1)
    averages.observe(stats(1.0, 2.5))
    want = {
        "snr/signal_sq": 0.5,
        "snr/noise_trace": 4.0,
        "snr/shrink_raw": 0.5,
        "snr/shrink_ema": 0.5,
        "snr/snr": 0.125,
        "snr/critical_batch_size": 8.0,  # of 8 prompts: shrink is 1/2
    }
    assert averages.metrics() == pytest.approx(want)


def test_without_a_signal_the_critical_batch_size_is_undefined():
    averages = averages_over(1)
    averages.observe(stats(1.0, 5.0))
    assert averages.signal < 0 < averages.noise
    assert set(averages.metrics()) == {"snr/signal_sq", "snr/noise_trace", "snr/shrink_raw", "snr/shrink_ema"}


def test_plugin_names_no_critical_batch_size():
    """Its signal contains the noise: under pure noise the size would be Q, for every Q."""
    averages = SnrAverages(SnrConfig(estimator="plugin", horizon=1), 8)
    averages.observe(stats(1.0, 4.0))
    assert set(averages.metrics()) == {"snr/signal_sq", "snr/noise_trace", "snr/shrink_raw", "snr/shrink_ema"}


def test_without_noise_the_critical_batch_size_is_zero():
    averages = averages_over(1)
    averages.observe(stats(1.0, 1.0))
    assert averages.metrics()["snr/critical_batch_size"] == 0.0 and "snr/snr" not in averages.metrics()


def test_the_state_survives_json():
    averages, restored = averages_over(7), averages_over(7)
    for sq_norm in (0.1, 0.2, 0.7):
        averages.observe(stats(sq_norm, 1.0))
    restored.load_state_dict(json.loads(json.dumps(averages.state_dict())))
    for each in (averages, restored):
        each.observe(stats(0.3, 0.9))
    assert averages.metrics() == restored.metrics()


def test_a_run_with_another_q_continues_with_the_noise_of_one_prompt():
    averages, restored = averages_over(7), averages_over(7, num_prompts=32)
    for sq_norm in (0.4, 0.5, 0.7):
        averages.observe(stats(sq_norm, 1.0))
    restored.load_state_dict(averages.state_dict())
    assert (restored.signal, restored.noise) == pytest.approx((averages.signal, averages.noise), rel=1e-14)
    assert restored.sq_norm == pytest.approx(averages.signal + averages.noise / 32, rel=1e-14)


def test_a_plug_in_signal_continues_with_the_noise_of_the_new_q():
    """A signal of 1 and noise of one prompt of 14: at Q = 7 the plug-in signal is 1 + 2, at Q = 28 it is 1 + 1/2."""
    averages, restored = (averages_over(7, num_prompts=size, estimator="plugin") for size in (7, 28))
    averages.load_state_dict({"count": 1, "signal_sum": 3 / 7, "sq_norm_sum": 5 / 7, "num_prompts": 7})
    restored.load_state_dict(averages.state_dict())
    assert (restored.signal, restored.sq_norm) == pytest.approx((1.5, 2.0), rel=1e-14)
