"""Learning-rate schedules behind one protocol; to add one, write a curve or a class and name it in `build_schedule`."""

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
    """Each step: `rate(step)`, then the optimizer's step, then `observe(stats)` of the same step's gradient."""

    def rate(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0; it knows the gradients of earlier steps only."""

    def observe(self, stats: GradientStats) -> None:
        """Take in the gradient of the step whose rate was drawn last."""

    def metrics(self) -> dict[str, float]:
        """What is logged as snr/*: the last step's estimates, and what the averages come to; no undefined ones."""

    def state_dict(self) -> ScheduleState:
        """What `load_state_dict` needs to go on as if unbroken: plain numbers, fit for JSON."""

    def load_state_dict(self, state: ScheduleState) -> None:
        """Go on from `state_dict`; UserError when it is another schedule's."""


class CurveSchedule:
    """A rate that is a function of the step alone; signal and noise are estimated for the log."""

    def __init__(self, name: str, curve: Callable[[int], float], averages: SnrAverages) -> None:
        self._name, self._averages = name, averages
        self.rate = curve

    def observe(self, stats: GradientStats) -> None:
        """See Schedule."""
        self._averages.observe(stats)

    def metrics(self) -> dict[str, float]:
        """See Schedule."""
        return self._averages.metrics()

    def state_dict(self) -> ScheduleState:
        """See Schedule."""
        return {"schedule": self._name, **self._averages.state_dict()}

    def load_state_dict(self, state: ScheduleState) -> None:
        """See Schedule."""
        check_schedule(state, self._name)
        self._averages.load_state_dict(state)


def cosine(step: int, *, lr: float, min_lr_ratio: float, num_steps: int) -> float:
    """lr at step 0 down to min_lr_ratio * lr at the last step (num_steps - 1) along half a cosine; flat after it."""
    progress = min(1.0, step / max(1, num_steps - 1))
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def build_schedule(
    algo: AlgoConfig, optimizer: OptimizerConfig, *, num_steps: int, num_prompts: int, seed: int = 0
) -> Schedule:
    """The schedule that `algo.schedule` names.

    Args:
        algo: schedule, schedule_from and snr are read.
        optimizer: lr (eta_0), lr_warmup_steps, name (for the snr exponent) and min_lr_ratio are read; a control has its
            source's rates.
        num_steps: length of the run, for the cosine and the controls.
        num_prompts: Q, to scale the noise of a fold to one prompt's.
        seed: of the run, for "shuffled".

    Raises:
        UserError: a control's source will not do, see `rate_controls.source_rates`.
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
