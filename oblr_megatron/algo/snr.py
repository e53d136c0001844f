"""Signal and noise of the gradient: estimates of one step, and their averages over steps.

    signal = ||grad J||^2
    noise  = tr(H), H the covariance of one prompt's gradient
    E||g||^2 = signal + noise / Q

With B = ||g||^2 known, an estimate of the signal gives one of the noise, and vice versa. To remove an estimator, delete
its function, its line in ESTIMATORS and its name in `config.algo.SnrConfig`.

OBLR-PO (arXiv 2511.23310, Theorem 4): eta = (1/C) N SNR / (1 + N SNR), SNR = signal / noise and N prompts. The factor
after 1/C is shrink = ||grad J||^2 / E||g||^2, in [0, 1]. It equals 1 / (1 + B_simple / N) of McCandlish et al.
(arXiv 1812.06162). C is unknown; eta_0 replaces 1/C (schedule.py).

Numerator and denominator of shrink are averaged separately, because the mean of clamped ratios is biased. Everything is
measured on the unclipped gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oblr_megatron.config.algo import AlgoConfig, SnrConfig
from oblr_megatron.types import GradientStats

ScheduleState = dict[str, str | float | int | bool | None]


@dataclass(frozen=True, slots=True)
class SignalNoise:
    """One step's estimates; NaN if undefined. signal <= 0 is common if the noise dominates.

    Example: SignalNoise(signal=0.02, noise=4.1, second_moment=0.08)
    """

    signal: float  # estimates ||grad J||^2
    noise: float  # estimates tr(H), H the covariance of one prompt's gradient
    second_moment: float  # estimates E||g||^2

    @property
    def shrink_raw(self) -> float:
        """signal / second_moment; NaN if second_moment is 0."""
        return self.signal / self.second_moment if self.second_moment else math.nan

    @property
    def defined(self) -> bool:
        """False with one fold, without any active group (B = 0), or if a norm overflowed."""
        return math.isfinite(self.shrink_raw)


MOMENTUM_HORIZON = 10.0
"""Steps over which the "momentum" estimator averages gradients."""
UNDEFINED = SignalNoise(math.nan, math.nan, math.nan)
Estimator = Callable[[GradientStats, int], SignalNoise]


def folds(stats: GradientStats, num_prompts: int) -> SignalNoise:
    """Unbiased estimates of signal and noise from R equal folds of whole prompts; "prompts" has R = Q.

        signal = (R B - M) / (R - 1),   noise = (M - B) R / (R - 1) * Q / R,   second_moment = B

    since E[B] = signal + noise / Q and E[M] = signal + noise R / Q. M = mean_f ||g_f||^2, g the mean of all g_f. Under
    pure noise the signal's standard deviation is sqrt(R / (R - 1)) times that of many folds (R = 4: 1.15).

    Folds must be independent. They are for every within-group baseline; a prior couples them through the other
    prompts' mean reward, to order 1 / (Q G)^2. They must also be equal in distribution. Sources of `data.train` take
    turns (`data.prompts.next_source`), so that with more sources than Q / R folds have different ones. The signal is
    then too small by the variance of the folds' expected gradients / (R - 1).

    Example: R = 2 orthogonal fold gradients of norm 1, Q = 2: B = 0.5, M = 1 -> signal 0, noise 1, shrink_raw 0.
    """
    sq_norm, mean, count = stats.sq_norm, stats.fold_sq_norm_mean, stats.num_folds
    if count < 2 or not (0 < sq_norm < math.inf and math.isfinite(mean)):
        return UNDEFINED
    signal = (count * sq_norm - mean) / (count - 1)
    noise = (mean - sq_norm) * num_prompts / (count - 1)
    return SignalNoise(signal, noise, sq_norm)


def momentum(stats: GradientStats, num_prompts: int) -> SignalNoise:
    """signal = <g_t, m_{t-1}>, m the bias-corrected average of earlier raw gradients; the rest of B is noise.

    Given the weights, g_t is independent of m_{t-1}, so that E[signal] = <grad J_t, m_{t-1}>. That is close to the
    signal if the gradient's direction changes slower than the average forgets (MOMENTUM_HORIZON), and too small if
    it changes faster. Needs no folds. Undefined in the first step.
    """
    return _from_signal(stats.momentum_dot, stats.sq_norm, num_prompts)


def samples(stats: GradientStats, num_prompts: int) -> SignalNoise:
    """noise / Q = sum_n c_n^2 w_n, c the samples' coefficients and w their squared norms; the rest of B is signal.

    The bias is ((G - 1) / G E<A_i s_i, A_j s_j> - ||grad J||^2) / Q, with i != j of one prompt: E||g||^2 has a term for
    every such pair, and this estimator counts all of them as signal. The gradient of a KL penalty or of a router loss
    is in B but not in the squares, so it also counts as signal. For comparison only.
    """
    return _from_signal(stats.sq_norm - stats.sample_sq_norm, stats.sq_norm, num_prompts)


def plugin(stats: GradientStats, num_prompts: int) -> SignalNoise:
    """signal = B, the paper's likely form (arXiv 2511.23310, Theorem 4): shrink = B / (B + noise / Q), noise by folds.

    Under pure noise B is noise / Q, so that shrink is near 1/2 instead of 0. For comparison only.
    """
    noise = folds(stats, num_prompts).noise
    return SignalNoise(stats.sq_norm, noise, stats.sq_norm + noise / num_prompts)


def _from_signal(signal: float, sq_norm: float, num_prompts: int) -> SignalNoise:
    """The estimate with noise / Q = B - signal."""
    if not (0 < sq_norm < math.inf and math.isfinite(signal)):
        return UNDEFINED
    return SignalNoise(signal, (sq_norm - signal) * num_prompts, sq_norm)


ESTIMATORS: dict[str, Estimator] = {
    "folds": folds,
    "prompts": folds,
    "momentum": momentum,
    "samples": samples,
    "plugin": plugin,
}


def noise_settings(
    algo: AlgoConfig, group_size: int, scores: str = "", *, chosen: bool = False
) -> dict[str, float | str]:
    """The settings that the signal and the noise of one prompt's gradient depend on.

    Args:
        algo: baseline, norm_power, keep and kl_coefficient are read.
        group_size: G.
        scores: the reward's settings as text, from `config.reward.scores_of`.
        chosen: whether groups are chosen by their rewards (rollout.dynamic_sampling).
    """
    return {
        "group_size": group_size,
        "baseline": algo.baseline,
        "norm_power": algo.norm_power,
        "keep": algo.keep,
        "kl_coefficient": algo.kl_coefficient,
        "scores": scores,
        "chosen": chosen,
    }


def decay_of(config: SnrConfig) -> float:
    """Weight that the averages so far keep when a step is added."""
    return max(0.0, 1.0 - 1.0 / config.horizon)


class SnrAverages:
    """Bias-corrected exponential averages of signal and E||g||^2; their ratio is clamped last.

    The noise follows: noise / Q = E||g||^2 - signal. The config's `estimator`, `horizon` and `floor` are read.

    Args:
        config: of the averages.
        num_prompts: Q.
        of: `noise_settings`.
    """

    def __init__(self, config: SnrConfig, num_prompts: int, of: Mapping[str, float | str] | None = None) -> None:
        self.last: SignalNoise = UNDEFINED
        self._estimator = ESTIMATORS[config.estimator]
        self._plugin = config.estimator == "plugin"
        self._decay, self._floor = decay_of(config), config.floor
        self._num_prompts, self._of = num_prompts, dict(of or {})
        self.count = 0  # steps in the averages
        self._signal_sum = self._sq_norm_sum = 0.0  # decayed sums of (1 - decay) * value

    def observe(self, stats: GradientStats) -> bool:
        """Average one step's estimate. Returns False, with the averages unchanged, if the estimate is undefined."""
        self.last = self._estimator(stats, self._num_prompts)
        if not self.last.defined:
            return False
        self.count += 1
        self._signal_sum += (1 - self._decay) * (self.last.signal - self._signal_sum)
        self._sq_norm_sum += (1 - self._decay) * (self.last.second_moment - self._sq_norm_sum)
        return True

    @property
    def signal(self) -> float:
        """Average signal; NaN before the first observation."""
        return self._signal_sum / self._correction if self.count else math.nan

    @property
    def sq_norm(self) -> float:
        """Average of B = ||g||^2, or of B + noise / Q for "plugin"; NaN before the first observation."""
        return self._sq_norm_sum / self._correction if self.count else math.nan

    @property
    def noise(self) -> float:
        """Average noise of one prompt's gradient; NaN before the first observation."""
        return (self.sq_norm - self.signal) * self._num_prompts

    @property
    def critical_batch_size(self) -> float:
        """noise / signal, in prompts: B_simple of McCandlish et al. (arXiv 1812.06162); NaN if signal <= 0.

        A batch of this many prompts has shrink 1/2.
        """
        return max(0.0, self.noise) / self.signal if self.signal > 0 else math.nan

    @property
    def snr(self) -> float:
        """signal / noise of one prompt's gradient, the SNR of Theorem 4; NaN unless both are positive."""
        return self.signal / self.noise if self.signal > 0 and self.noise > 0 else math.nan

    @property
    def shrink(self) -> float:
        """Ratio of the averages, clamped to [floor, 1]; NaN before the first observation."""
        return min(max(self.signal / self.sq_norm, self._floor), 1.0) if self.count else math.nan

    @property
    def _correction(self) -> float:
        """Total weight of `count` observations in the decayed sums."""
        return 1 - self._decay**self.count

    def metrics(self) -> dict[str, float]:
        """The last step's estimates and the averages, without undefined values.

        The signal of "plugin" contains noise: under pure noise its critical size would be Q, whatever Q is.
        """
        values = {
            "snr/signal_sq": self.last.signal,
            "snr/noise_trace": self.last.noise,
            "snr/shrink_raw": self.last.shrink_raw,
            "snr/shrink_ema": self.shrink,
            "snr/snr": math.nan if self._plugin else self.snr,
            "snr/critical_batch_size": math.nan if self._plugin else self.critical_batch_size,
        }
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def state_dict(self) -> ScheduleState:
        """JSON-compatible values."""
        sums: ScheduleState = {"signal_sum": self._signal_sum, "sq_norm_sum": self._sq_norm_sum}
        return {"count": self.count, **sums, "num_prompts": self._num_prompts, **self._of}

    def load_state_dict(self, state: ScheduleState) -> None:
        """Restore `state_dict`, with the noise / Q of this run's Q. Averages of other settings begin again."""
        if any(state.get(name, value) != value for name, value in self._of.items()):
            return
        self.count = int(state["count"] or 0)
        self._signal_sum = float(state["signal_sum"] or 0.0)
        self._sq_norm_sum = float(state["sq_norm_sum"] or 0.0)
        num_prompts = int(state["num_prompts"] or 0)
        if num_prompts != self._num_prompts:
            noise = (self._sq_norm_sum - self._signal_sum) * num_prompts
            if self._plugin:  # its signal contains noise / Q
                self._signal_sum += noise / self._num_prompts - noise / num_prompts
            self._sq_norm_sum = self._signal_sum + noise / self._num_prompts
