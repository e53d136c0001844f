"""A run as the checks of alarms.py see it: counters, and the first and last values of each metric."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oblr_megatron.config.baselines import BASELINES, Baseline, facts_of
from oblr_megatron.config.reward import scores_of
from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from oblr_megatron.metrics import Record

EDGE = 20  # first and last values of a metric that are compared
COLLAPSED = 1 / 3  # share of optimizer.lr: the least rate of Adam under the schedule's default floor is 0.32 of it
SLOWER = 1.2  # times the median rank's own time; a rank above it for EDGE steps is slow

# Steps with equal lengths or equal rewards leave these undefined; that is no problem.
MAY_BE_UNDEFINED = frozenset({"gradnorm/length_corr", "gradnorm/estimate_corr", "baseline/variance_ratio_vs_rloo"})
EPISODES = ("environment/failures", "environment/timeouts")
COUNTED = ("gradnorm/nonfinite", "reward/failures", "reward/timeouts", *EPISODES)
CRITICAL = "snr/critical_batch_size"
SPLIT = ("snr/between", "snr/within", "snr/best_group_size")
FORGOTTEN = (
    *SPLIT,
    CRITICAL,
    "snr/shrink_ema",
    "temper/energy",
    "baseline/spread",
    "groups/mixed_fraction",
    "reward/mean",
    "reward/std",
    "entropy",
)
"""Metrics that a check compares with a setting of Planned, or with one of these. When Planned changes, their courses
begin again."""


@dataclass(slots=True)
class Course:
    """The first and last values of one metric."""

    early: list[float] = field(default_factory=list)  # the first EDGE values
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=EDGE))  # the last EDGE values
    count: int = 0

    def add(self, value: float) -> None:
        if len(self.early) < EDGE:
            self.early.append(value)
        self.recent.append(value)
        self.count += 1

    @property
    def ends(self) -> tuple[float, float] | None:
        """Medians of the first and the last values; None while the two overlap."""
        if self.count < 2 * EDGE:
            return None
        return statistics.median(self.early), statistics.median(self.recent)

    @property
    def risen(self) -> float:
        """Rise of the mean from the first to the last values, in standard errors; 0 while the two overlap."""
        if self.count < 2 * EDGE:
            return 0.0
        change = statistics.fmean(self.recent) - statistics.fmean(self.early)
        variance = (statistics.variance(self.recent) + statistics.variance(self.early)) / EDGE
        return change / max(variance**0.5, 1e-9)


@dataclass(frozen=True, slots=True)
class Planned:
    """Settings of the run that the checks compare with; 0 where there is nothing to compare.

    Example: Planned(lr=1e-6, lr_warmup_steps=10, num_prompts=128, noise_prompts=128, group_size=8)
    """

    lr: float = 0.0  # eta_0 of a schedule that may lower it without end
    lr_warmup_steps: int = 0
    num_prompts: int = 0
    noise_prompts: int = 0  # num_prompts, or 0 if the noise is that of a part of the batch, or not estimated
    group_size: int = 0
    num_folds: int = 1  # num_prompts is a multiple of it
    of_earlier_steps: bool = False  # whether the baseline averages rewards of earlier steps
    norm_power: float = 0.0
    scores: str = ""  # `config.reward.scores_of`


@dataclass(slots=True)
class Window:
    """The run so far, as far as the checks need it."""

    planned: Planned
    step: int = 0
    courses: defaultdict[str, Course] = field(default_factory=lambda: defaultdict(Course))  # of each metric
    nulls: Counter[str] = field(default_factory=Counter)  # number of non-finite values by metric
    totals: Counter[str] = field(default_factory=Counter)  # sums of the COUNTED metrics
    resting: int = 0  # consecutive steps with a low rate
    lagging: int = 0  # consecutive steps with the same rank SLOWER than the median
    laggard: float = -1.0  # that rank
    cause: str = ""  # first error of the reward
    changed_at: int = 0  # last step before the latest change of settings

    def add(self, record: Record) -> None:
        """Add one record of metrics.jsonl."""
        self.step = int(record["step"] or 0)
        for name, value in record.items():
            if value is None:
                self.nulls[name] += name not in MAY_BE_UNDEFINED
                continue
            self.courses[name].add(value)
            if name in COUNTED:
                self.totals[name] += int(value)
        if critical_size(record) == math.inf:
            self.courses[CRITICAL].add(math.inf)
        lr = record.get("lr")
        if lr is not None and self.planned.lr > 0 and self.step > self.planned.lr_warmup_steps:
            self.resting = self.resting + 1 if lr <= COLLAPSED * self.planned.lr else 0
        rank, ratio = record.get("perf/slowest_rank"), record.get("perf/slowest_rank_ratio")
        if rank is not None and ratio is not None:
            self.lagging = 0 if ratio <= SLOWER else self.lagging + 1 if rank == self.laggard else 1
            self.laggard = rank

    def change(self, settings: Planned) -> None:
        """Compare with other settings from the next record on, and with none that was logged before."""
        self.planned, self.resting, self.changed_at = settings, 0, self.step
        for name in FORGOTTEN:
            self.courses.pop(name, None)


def critical_size(record: Record) -> float | None:
    """The critical batch size: infinite where the averaged signal is not positive, None where no average is logged."""
    size = record.get(CRITICAL)
    return math.inf if size is None and record.get("snr/shrink_ema") is not None else size


def planned(setting: Callable[[str], Any]) -> Planned:
    """The settings that the checks need, from a function of dotted keys to values (None: not known).

    With several updates on a batch, the signal and noise are those of the first update, on a part of the prompts. So
    no number of prompts is compared with them. The group size needs no such exception: the split of the noise needs
    norms. The estimator "plugin" logs no critical batch size.
    """
    compared = (setting("algo.updates_per_batch") or 1) == 1 and setting("algo.snr.estimator") != "plugin"
    prompts = setting("num_prompts") or 0
    facts = _facts(setting("algo.baseline"))
    return Planned(
        lr=(setting("optimizer.lr") or 0.0) if setting("algo.schedule") == "snr" else 0.0,
        lr_warmup_steps=setting("optimizer.lr_warmup_steps") or 0,
        num_prompts=prompts,
        noise_prompts=prompts if compared else 0,
        group_size=setting("group_size") or 0,
        num_folds=setting("algo.snr.num_folds") or 1,
        of_earlier_steps=facts is not None and facts.pool != "",
        norm_power=setting("algo.norm_power") or 0.0,
        scores=scores_of(setting),
    )


def _facts(name: str | None) -> Baseline | None:
    """None: the baseline is not recorded, or of another version, or a user's that is not on this machine."""
    try:
        return facts_of(name) if name is not None and ":" in name else BASELINES.get(name or "")
    except UserError:
        return None
