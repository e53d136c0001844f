"""Estimators of the signal and noise of one step's gradient, each a function (stats, Q) -> Estimate.

    signal = ||grad J||^2
    noise  = tr(H), H the covariance of one prompt's gradient
    E||g||^2 = signal + noise / Q

With B = ||g||^2 known, an estimate of the signal gives one of the noise, and vice versa. To remove an estimator, delete
its function, its line in ESTIMATORS and its name in `config.algo.SnrConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.errors import UserError
from oblr_megatron.types import GradientStats


@dataclass(frozen=True, slots=True)
class Estimate:
    """One step's estimates; NaN if undefined. signal <= 0 is common if the noise dominates.

    Example: Estimate(signal=0.02, noise=4.1, second_moment=0.08)
    """

    signal: float  # of ||grad J||^2
    noise: float  # of tr(H), the covariance of one prompt's gradient
    second_moment: float  # of E||g||^2

    @property
    def shrink_raw(self) -> float:
        """signal / second_moment; NaN if second_moment is 0."""
        return self.signal / self.second_moment if self.second_moment else math.nan

    @property
    def defined(self) -> bool:
        """False with one fold, without any active group (B = 0), or if a norm overflowed."""
        return math.isfinite(self.shrink_raw)


UNDEFINED = Estimate(math.nan, math.nan, math.nan)
Estimator = Callable[[GradientStats, int], Estimate]


def folds(stats: GradientStats, num_prompts: int) -> Estimate:
    """Unbiased estimates of signal and noise from R equal folds of whole prompts; "prompts" has R = Q.

        signal = (R B - M) / (R - 1),   noise = (M - B) R / (R - 1) * Q / R,   second_moment = B

    since E[B] = signal + noise / Q and E[M] = signal + noise R / Q. M = mean_f ||g_f||^2, g the mean of all g_f. Under
    pure noise the signal's standard deviation is sqrt(R / (R - 1)) times that of many folds (R = 4: 1.15).

    Folds must be independent. They are for every within-group baseline; `optimal_prior` couples them through the other
    prompts' mean reward, to order 1 / (Q G)^2.

    Example: R = 2 orthogonal fold gradients of norm 1, Q = 2: B = 0.5, M = 1 -> signal 0, noise 1, shrink_raw 0.
    """
    sq_norm, mean, count = stats.sq_norm, stats.fold_sq_norm_mean, stats.num_folds
    if count < 2 or not (0 < sq_norm < math.inf and math.isfinite(mean)):
        return UNDEFINED
    signal = (count * sq_norm - mean) / (count - 1)
    noise = (mean - sq_norm) * num_prompts / (count - 1)
    return Estimate(signal, noise, sq_norm)


def momentum(stats: GradientStats, num_prompts: int) -> Estimate:
    """signal = <g_t, m_{t-1}>, m the bias-corrected average of earlier raw gradients; the rest of B is noise.

    Given the weights, g_t is independent of m_{t-1}, so that E[signal] = <grad J_t, m_{t-1}>. That is close to the
    signal if the gradient's direction changes slower than the average forgets (snr.momentum_horizon), and too small if
    it changes faster. Needs no folds. Undefined in the first step.
    """
    return _from_signal(stats.momentum_dot, stats.sq_norm, num_prompts)


def samples(stats: GradientStats, num_prompts: int) -> Estimate:
    """noise / Q = sum_n c_n^2 w_n, c the samples' coefficients and w their squared norms; the rest of B is signal.

    The bias is ((G - 1) / G E<A_i s_i, A_j s_j> - ||grad J||^2) / Q, with i != j of one prompt: E||g||^2 has a term for
    every such pair, and this estimator counts all of them as signal. The gradient of a KL penalty or of a router loss
    is in B but not in the squares, so it also counts as signal. For comparison only.
    """
    return _from_signal(stats.sq_norm - stats.sample_sq_norm, stats.sq_norm, num_prompts)


def plugin(stats: GradientStats, num_prompts: int) -> Estimate:
    """signal = B, the paper's likely form (arXiv 2511.23310, Theorem 4): shrink = B / (B + noise / Q), noise by folds.

    Under pure noise B is noise / Q, so that shrink is near 1/2 instead of 0. For comparison only.
    """
    noise = folds(stats, num_prompts).noise
    return Estimate(stats.sq_norm, noise, stats.sq_norm + noise / num_prompts)


def _from_signal(signal: float, sq_norm: float, num_prompts: int) -> Estimate:
    """The estimate with noise / Q = B - signal."""
    if not (0 < sq_norm < math.inf and math.isfinite(signal)):
        return UNDEFINED
    return Estimate(signal, (sq_norm - signal) * num_prompts, sq_norm)


ESTIMATORS: dict[str, Estimator] = {
    "folds": folds,
    "prompts": folds,
    "momentum": momentum,
    "samples": samples,
    "plugin": plugin,
}


def check_estimator(algo: AlgoConfig, *, norms: bool) -> None:
    """Refuse an estimator that needs gradient norms in a run without `norms`.

    Raises:
        UserError: the estimator is "samples", and the run measures no norms of its responses' gradients.
    """
    if algo.snr.estimator == "samples" and not norms:
        raise UserError(
            f"estimator 'samples' needs gradient norms, but baseline {algo.baseline!r} measures none",
            where="algo.snr.estimator",
            fix="set gradnorm.always to true and gradnorm.source to exact or sketch, or select another estimator",
        )
