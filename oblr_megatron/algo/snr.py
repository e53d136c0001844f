"""The learning rate from the signal and noise of the gradient.

OBLR-PO (arXiv 2511.23310, Theorem 4): eta = (1/C) N SNR / (1 + N SNR), SNR = ||grad J||^2 / tr(H), with H the
covariance of one prompt's gradient and N prompts. The factor after 1/C is shrink = ||grad J||^2 / E||g||^2, in [0, 1].
It equals 1 / (1 + B_simple / N) of McCandlish et al. (arXiv 1812.06162). C is unknown; eta_0 replaces 1/C.

One step's estimates (snr_estimators.py) are averaged over steps, numerator and denominator separately, because the mean
of clamped ratios is biased. Everything is measured on the unclipped gradient.
"""

from __future__ import annotations

import math

from oblr_megatron.algo.snr_estimators import ESTIMATORS, UNDEFINED, Estimate
from oblr_megatron.config.algo import SnrConfig
from oblr_megatron.types import GradientStats

ScheduleState = dict[str, str | float | int | bool | None]


def decay_of(config: SnrConfig) -> float:
    """Weight that the averages so far keep when a step is added."""
    return max(0.0, 1.0 - 1.0 / config.horizon)


class SnrAverages:
    """Bias-corrected exponential averages of signal and E||g||^2; their ratio is clamped last.

    The noise follows: noise / Q = E||g||^2 - signal. The config's `estimator`, `horizon` and `floor` are read.
    """

    def __init__(self, config: SnrConfig, num_prompts: int) -> None:
        self.last: Estimate = UNDEFINED
        self._estimator = ESTIMATORS[config.estimator]
        self._decay, self._floor = decay_of(config), config.floor
        self._num_prompts = num_prompts
        self._count = 0
        self._signal_sum = self._sq_norm_sum = 0.0  # decayed sums of (1 - decay) * value

    def observe(self, stats: GradientStats) -> bool:
        """Average one step's estimate. Returns False, with the averages unchanged, if the estimate is undefined."""
        self.last = self._estimator(stats, self._num_prompts)
        if not self.last.defined:
            return False
        self._count += 1
        self._signal_sum += (1 - self._decay) * (self.last.signal - self._signal_sum)
        self._sq_norm_sum += (1 - self._decay) * (self.last.second_moment - self._sq_norm_sum)
        return True

    @property
    def signal(self) -> float:
        """Average signal; NaN before the first observation."""
        return self._signal_sum / self._correction if self._count else math.nan

    @property
    def sq_norm(self) -> float:
        """Average of B = ||g||^2, or of B + noise / Q for "plugin"; NaN before the first observation."""
        return self._sq_norm_sum / self._correction if self._count else math.nan

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
        return min(max(self.signal / self.sq_norm, self._floor), 1.0) if self._count else math.nan

    @property
    def _correction(self) -> float:
        """Total weight of `count` observations in the decayed sums."""
        return 1 - self._decay**self._count

    def metrics(self) -> dict[str, float]:
        """The last step's estimates and the averages, without undefined values."""
        values = {
            "snr/signal_sq": self.last.signal,
            "snr/noise_trace": self.last.noise,
            "snr/shrink_raw": self.last.shrink_raw,
            "snr/shrink_ema": self.shrink,
            "snr/snr": self.snr,
            "snr/critical_batch_size": self.critical_batch_size,
        }
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def state_dict(self) -> ScheduleState:
        """JSON-compatible values."""
        sums: ScheduleState = {"signal_sum": self._signal_sum, "sq_norm_sum": self._sq_norm_sum}
        return {"count": self._count, **sums, "num_prompts": self._num_prompts}

    def load_state_dict(self, state: ScheduleState) -> None:
        """Restore `state_dict`, with the noise / Q of this run's Q; an earlier version did not save its Q."""
        self._count = int(state["count"] or 0)
        self._signal_sum = float(state["signal_sum"] or 0.0)
        self._sq_norm_sum = float(state["sq_norm_sum"] or 0.0)
        num_prompts = int(state.get("num_prompts") or self._num_prompts)
        if num_prompts != self._num_prompts:
            noise = (self._sq_norm_sum - self._signal_sum) * num_prompts
            self._sq_norm_sum = self._signal_sum + noise / self._num_prompts
