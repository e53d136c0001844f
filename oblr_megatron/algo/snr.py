"""Signal and noise of the gradient, and the learning rate that follows from them.

OBLR-PO (arXiv 2511.23310, Theorem 4): eta = (1/C) N SNR / (1 + N SNR), SNR = ||grad J||^2 / tr(H), H the covariance of
one prompt's gradient. That factor is shrink = ||grad J||^2 / E||g||^2, in [0, 1]; it equals 1 / (1 + B_simple / N) of
McCandlish et al. (arXiv 1812.06162). C is not known; eta_0 stands for 1/C.

What one step says of signal and noise (snr_estimators.py) is averaged over steps, numerator and denominator apart,
because the mean of clamped ratios is biased. Everything is measured on the unclipped gradient.
"""

from __future__ import annotations

import math

from oblr_megatron.algo.snr_estimators import ESTIMATORS, UNDEFINED, Estimate
from oblr_megatron.config import OptimizerConfig
from oblr_megatron.config.algo import SnrConfig
from oblr_megatron.errors import UserError
from oblr_megatron.types import GradientStats

ScheduleState = dict[str, str | float | int | bool | None]


class SnrAverages:
    """Bias-corrected exponential averages of signal and E||g||^2, kept apart, divided and clamped last.

    The noise follows from the two: noise / Q = E||g||^2 - signal. Of the config, `estimator`, `horizon` and `floor` are
    read.
    """

    def __init__(self, config: SnrConfig, num_prompts: int) -> None:
        self.last: Estimate = UNDEFINED
        self._estimator = ESTIMATORS[config.estimator]
        self._decay, self._floor = max(0.0, 1.0 - 1.0 / config.horizon), config.floor
        self._num_prompts = num_prompts
        self._count = 0
        self._signal_sum = self._sq_norm_sum = 0.0  # decayed sums of (1 - decay) * value

    def observe(self, stats: GradientStats) -> bool:
        """Take in one step's gradient; an undefined estimate leaves the averages as they were and returns False."""
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
        """Average E||g||^2: of B, for "plugin" of B + noise / Q; NaN before the first observation."""
        return self._sq_norm_sum / self._correction if self._count else math.nan

    @property
    def noise(self) -> float:
        """Average noise, of one prompt's gradient; NaN before the first observation."""
        return (self.sq_norm - self.signal) * self._num_prompts

    @property
    def critical_batch_size(self) -> float:
        """noise / signal, in prompts: B_simple of McCandlish et al. (arXiv 1812.06162); NaN without a signal.

        A batch of so many prompts has shrink 1/2: half of E||g||^2 is signal.
        """
        return max(0.0, self.noise) / self.signal if self.signal > 0 else math.nan

    @property
    def snr(self) -> float:
        """signal / noise of one prompt's gradient, SNR of Theorem 4; NaN unless both are positive."""
        return self.signal / self.noise if self.signal > 0 and self.noise > 0 else math.nan

    @property
    def shrink(self) -> float:
        """Ratio of the averages, clamped to [floor, 1]; NaN before the first observation."""
        return min(max(self.signal / self.sq_norm, self._floor), 1.0) if self._count else math.nan

    @property
    def _correction(self) -> float:
        """Weight that `count` observations have in the decayed sums."""
        return 1 - self._decay**self._count

    def metrics(self) -> dict[str, float]:
        """The last step's raw estimates, and what the averages come to; an undefined one is left out."""
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
        """Plain numbers, fit for JSON."""
        return {"count": self._count, "signal_sum": self._signal_sum, "sq_norm_sum": self._sq_norm_sum}

    def load_state_dict(self, state: ScheduleState) -> None:
        """Go on from `state_dict`."""
        self._count = int(state["count"] or 0)
        self._signal_sum = float(state["signal_sum"] or 0.0)
        self._sq_norm_sum = float(state["sq_norm_sum"] or 0.0)


class SnrSchedule:
    """eta_t = eta_0 * ramp(t) * (shrink / shrink_ref)^alpha, from averages over the steps before t.

    - ramp: of optimizer.lr_warmup_steps, as under every schedule.
    - In the first warmup_steps steps the averages are collected and not yet used: the rate is eta_0.
    - shrink is the ratio of the averages, clamped to [floor, 1].
    - shrink_ref is 1, or the shrink found when warm-up ends, so that eta_0 is the rate at that point.
    - alpha is 1 for SGD and 0.5 for Adam, which divides by sqrt(v) already.
    - After that the rate changes by at most max_change a step, and holds when a step gave no estimate.

    The rate of step t must not depend on g_t, or the update is biased: `rate(t)` is drawn first, `observe` comes after,
    and drawing the same step again gives the same rate.
    """

    def __init__(self, config: SnrConfig, optimizer: OptimizerConfig, num_prompts: int) -> None:
        self._config, self._lr, self._ramp_steps = config, optimizer.lr, optimizer.lr_warmup_steps
        self._exponent = config.exponent or (1.0 if optimizer.name == "sgd" else 0.5)
        self._averages = SnrAverages(config, num_prompts)
        self._reference = 1.0 if config.reference == "one" else None
        self._factor = 1.0  # (shrink / shrink_ref)^alpha, rate-limited
        self._fresh = False  # the averages have moved since the factor did
        self._latest: tuple[int, float] | None = None  # the step drawn last and its rate
        self._awaiting = False  # that step's gradient has not been observed yet

    def rate(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0; steps are drawn in order."""
        if self._latest is not None and self._latest[0] == step:
            return self._latest[1]
        if step >= self._config.warmup_steps and self._fresh:
            self._move_factor()
        self._fresh = False
        self._latest, self._awaiting = (step, self._lr * ramp(step, self._ramp_steps) * self._factor), True
        return self._latest[1]

    def observe(self, stats: GradientStats) -> None:
        """Take in the gradient of the step whose rate was drawn last."""
        assert self._awaiting, "observe() before rate(): a step's rate would depend on its own gradient"
        self._awaiting = False
        self._fresh = self._averages.observe(stats)

    def metrics(self) -> dict[str, float]:
        """What is logged each step, after `observe`."""
        return self._averages.metrics()

    def state_dict(self) -> ScheduleState:
        """Everything the next rate depends on, as plain numbers."""
        own: ScheduleState = {"factor": self._factor, "reference": self._reference, "fresh": self._fresh}
        return {"schedule": "snr", **own, **self._averages.state_dict()}

    def load_state_dict(self, state: ScheduleState) -> None:
        """Go on from `state_dict`.

        Raises:
            UserError: the state is another schedule's.
        """
        check_schedule(state, "snr")
        self._averages.load_state_dict(state)
        self._factor, self._fresh = float(state["factor"] or 1.0), bool(state["fresh"])
        self._reference = None if state["reference"] is None else float(state["reference"])
        self._latest, self._awaiting = None, False

    def _move_factor(self) -> None:
        shrink = self._averages.shrink
        if self._reference is None:
            self._reference = shrink
        target = (shrink / self._reference) ** self._exponent
        step = self._config.max_change
        self._factor = min(max(target, self._factor / step), self._factor * step)


def ramp(step: int, warmup_steps: int) -> float:
    """Share of the rate in step `step`, counted from 0: (step + 1) / warmup_steps up to 1."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def check_schedule(state: ScheduleState, name: str) -> None:
    """Refuse to resume from the state of another schedule.

    Raises:
        UserError: it is another's.
    """
    if state.get("schedule") != name:
        raise UserError(
            f"the checkpoint holds the state of schedule {state.get('schedule')!r}, the run is set to {name!r}",
            where="algo.schedule",
            fix="resume with the checkpoint's schedule, or start a new run from its weights",
        )
