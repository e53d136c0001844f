"""Learning-rate schedules. To add one, write a curve or a subclass of `Schedule` and name it in `build_schedule`."""

from __future__ import annotations

import math
from collections.abc import Callable

from oblr_megatron.algo.snr import ScheduleState, SnrAverages, noise_settings
from oblr_megatron.config import OptimizerConfig
from oblr_megatron.config.algo import AlgoConfig, SnrConfig
from oblr_megatron.types import GradientStats


class Schedule:
    """A rate that depends only on the step. Signal and noise are still estimated for the log.

    Each step calls `rate(step)`, then the optimizer, then `observe(stats)` with the same step's gradient.

    Args:
        curve: the rate of a step after the warm-up.
        averages: of signal and noise.
        warmup_steps: steps in which the rate rises, see `ramp`.
    """

    def __init__(self, curve: Callable[[int], float], averages: SnrAverages, warmup_steps: int = 0) -> None:
        self._curve, self._averages, self._warmup_steps = curve, averages, warmup_steps
        self.ahead = 0
        """Steps done beyond `step`: a resume with another algo.updates_per_batch does not warm up again."""

    def rate(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0; depends only on the gradients of earlier steps."""
        return self._curve(step) * ramp(step + self.ahead, self._warmup_steps)

    def observe(self, stats: GradientStats) -> None:
        """Record the gradient of the step that `rate` was last called for."""
        self._averages.observe(stats)

    def metrics(self) -> dict[str, float]:
        """The snr/* metrics, after `observe`; see `SnrAverages.metrics`."""
        return self._averages.metrics()

    def state_dict(self) -> ScheduleState:
        """Everything that the next rate depends on: JSON-compatible values."""
        return self._averages.state_dict()

    def load_state_dict(self, state: ScheduleState) -> None:
        """Restore `state_dict` of the same schedule, which a resume compares."""
        self._averages.load_state_dict(state)


class SnrSchedule(Schedule):
    """eta_t = eta_0 * ramp(t) * (shrink / shrink_ref)^alpha, from averages over the steps before t.

    - ramp: over optimizer.lr_warmup_steps, as in every schedule.
    - Until the averages hold warmup_steps steps they are not used: the rate is eta_0. Steps without an estimate do not
      count. If a resume with other settings begins the averages again, the rate stays where it was for as many steps.
    - shrink is the ratio of the averages, clamped to [floor, 1].
    - shrink_ref is 1, or the shrink at the end of the warm-up, so that eta_0 is the rate at that step.
    - alpha is 1 for SGD and 0.5 for Adam, which already divides by sqrt(v).
    - After the warm-up the rate changes by at most max_change in a step, and holds after a step without an estimate.

    The rate of step t must not depend on g_t, or the update is biased. So `rate(t)` comes first and `observe` after it;
    calling `rate(t)` again returns the same rate. Call it for steps in order.
    """

    def __init__(self, config: SnrConfig, optimizer: OptimizerConfig, averages: SnrAverages) -> None:
        super().__init__(constant(optimizer), averages, optimizer.lr_warmup_steps)
        self._config = config
        self._exponent = config.exponent or (1.0 if optimizer.name == "sgd" else 0.5)
        self._shrink_ref = 1.0 if config.reference == "one" else None
        self._factor = 1.0  # (shrink / shrink_ref)^alpha, limited by max_change
        self._fresh = False  # the averages have changed since the factor did
        self._latest: tuple[int, float] | None = None  # the last step passed to `rate`, and its rate
        self._awaiting = False  # that step's gradient has not been observed yet

    def rate(self, step: int) -> float:
        if self._latest is not None and self._latest[0] == step:
            return self._latest[1]
        if self._averages.count >= self._config.warmup_steps and self._fresh:
            self._move_factor()
        self._fresh = False
        self._latest, self._awaiting = (step, super().rate(step) * self._factor), True
        return self._latest[1]

    def observe(self, stats: GradientStats) -> None:
        assert self._awaiting, "observe() before rate(): the rate would depend on its own gradient"
        self._awaiting = False
        self._fresh = self._averages.observe(stats)

    def state_dict(self) -> ScheduleState:
        own: ScheduleState = {"factor": self._factor, "reference": self._shrink_ref, "fresh": self._fresh}
        return super().state_dict() | own

    def load_state_dict(self, state: ScheduleState) -> None:
        super().load_state_dict(state)
        begun_again = bool(state["count"]) and not self._averages.count
        self._factor, self._fresh = float(state["factor"] or 1.0), bool(state["fresh"]) and not begun_again
        self._shrink_ref = None if state["reference"] is None else float(state["reference"])
        self._latest, self._awaiting = None, False

    def _move_factor(self) -> None:
        shrink = self._averages.shrink
        if self._shrink_ref is None:
            self._shrink_ref = shrink
        target = (shrink / self._shrink_ref) ** self._exponent
        step = self._config.max_change
        self._factor = min(max(target, self._factor / step), self._factor * step)


def ramp(step: int, warmup_steps: int) -> float:
    """Warm-up factor of step `step`, counted from 0: (step + 1) / warmup_steps, at most 1."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def constant(optimizer: OptimizerConfig) -> Callable[[int], float]:
    """optimizer.lr in every step."""
    return lambda _: optimizer.lr


def cosine(optimizer: OptimizerConfig, num_steps: int) -> Callable[[int], float]:
    """Half a cosine, from lr at step 0 to min_lr_ratio * lr at the last step; constant after it."""

    def rate(step: int) -> float:
        progress, least = min(1.0, step / max(1, num_steps - 1)), optimizer.min_lr_ratio
        share = least + (1 - least) * 0.5 * (1 + math.cos(math.pi * progress))
        return optimizer.lr * share

    return rate


def build_schedule(
    algo: AlgoConfig,
    optimizer: OptimizerConfig,
    *,
    num_steps: int,
    num_prompts: int,
    group_size: int = 1,
    scores: str = "",
    chosen: bool = False,
) -> Schedule:
    """The schedule that `algo.schedule` names.

    Args:
        algo: schedule, snr, baseline, norm_power, keep and kl_coefficient are read.
        optimizer: lr (eta_0), lr_warmup_steps, name (for the snr exponent) and min_lr_ratio are read.
        num_steps: length of the run, for the cosine.
        num_prompts: Q, to scale the noise of a fold to that of one prompt.
        group_size: G, on which that noise depends.
        scores: the reward's settings as text, from `config.reward.scores_of`.
        chosen: whether groups are chosen by their rewards (rollout.dynamic_sampling).
    """
    averages = SnrAverages(algo.snr, num_prompts, noise_settings(algo, group_size, scores, chosen=chosen))
    match algo.schedule:
        case "snr":
            return SnrSchedule(algo.snr, optimizer, averages)
        case "constant":
            curve = constant(optimizer)
        case "cosine":
            curve = cosine(optimizer, num_steps)
    return Schedule(curve, averages, optimizer.lr_warmup_steps)
