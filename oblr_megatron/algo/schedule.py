"""Learning-rate schedules with one protocol. To add one, write a curve or a class and name it in `build_schedule`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from oblr_megatron.algo.rate_controls import control_rates
from oblr_megatron.algo.snr import ScheduleState, SnrAverages, SnrSchedule, check_schedule, ramp
from oblr_megatron.config import OptimizerConfig
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.types import GradientStats


class Schedule(Protocol):
    """Each step calls `rate(step)`, then the optimizer, then `observe(stats)` with the same step's gradient."""

    def rate(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0; depends only on the gradients of earlier steps."""

    def observe(self, stats: GradientStats) -> None:
        """Record the gradient of the step that `rate` was last called for."""

    def metrics(self) -> dict[str, float]:
        """The snr/* metrics: the last step's estimates and the averages, without undefined values."""

    def state_dict(self) -> ScheduleState:
        """Everything that `load_state_dict` needs to continue exactly: JSON-compatible values."""

    def load_state_dict(self, state: ScheduleState) -> None:
        """Restore `state_dict`; UserError if it belongs to another schedule."""


class CurveSchedule:
    """A rate that depends only on the step. Signal and noise are still estimated for the log."""

    def __init__(self, name: str, curve: Callable[[int], float], averages: SnrAverages) -> None:
        self._name, self._averages = name, averages
        self.rate = curve

    def observe(self, stats: GradientStats) -> None:
        self._averages.observe(stats)

    def metrics(self) -> dict[str, float]:
        return self._averages.metrics()

    def state_dict(self) -> ScheduleState:
        return {"schedule": self._name, **self._averages.state_dict()}

    def load_state_dict(self, state: ScheduleState) -> None:
        check_schedule(state, self._name)
        self._averages.load_state_dict(state)


def cosine(step: int, *, lr: float, min_lr_ratio: float, num_steps: int) -> float:
    """Half a cosine from lr at step 0 to min_lr_ratio * lr at the last step (num_steps - 1); constant after it."""
    progress = min(1.0, step / max(1, num_steps - 1))
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def build_schedule(
    algo: AlgoConfig, optimizer: OptimizerConfig, *, num_steps: int, num_prompts: int, seed: int = 0
) -> Schedule:
    """The schedule that `algo.schedule` names.

    Args:
        algo: schedule, schedule_from and snr are read.
        optimizer: lr (eta_0), lr_warmup_steps, name (for the snr exponent) and min_lr_ratio are read. Control schedules
            use their source's rates instead.
        num_steps: length of the run, for the cosine and the controls.
        num_prompts: Q, to scale the noise of a fold to that of one prompt.
        seed: the run's seed, for "shuffled".

    Raises:
        UserError: a control's source is invalid, see `rate_controls.source_rates`.
    """
    averages, warmup = SnrAverages(algo.snr, num_prompts), optimizer.lr_warmup_steps
    match algo.schedule:
        case "constant":
            return CurveSchedule("constant", lambda step: optimizer.lr * ramp(step, warmup), averages)
        case "cosine":
            options = {"lr": optimizer.lr, "min_lr_ratio": optimizer.min_lr_ratio}
            return CurveSchedule(
                "cosine", lambda step: cosine(step, num_steps=num_steps, **options) * ramp(step, warmup), averages
            )
        case "snr":
            return SnrSchedule(algo.snr, optimizer, num_prompts)
        case "shuffled" | "matched_decay":
            rates = control_rates(algo, num_steps=num_steps, seed=seed)
            return CurveSchedule(algo.schedule, lambda step: rates[step], averages)
