"""Summarise a study of curves: level, stability and paired differences per task and arm, and the sweeps.

summary.md   tables                                   *.svg, *.png   charts
runs.csv     one line per run, including the sweeps
"""

from __future__ import annotations

import csv
import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from oblr_megatron.checks.packages import package_versions
from oblr_megatron.errors import UserError
from studies.plan import Plan
from studies.results import Key, Result, read_result, selection_of, sweep_results
from studies.statistics import (
    Array,
    Difference,
    Interval,
    paired_difference,
)
from studies.sweep import Cell

Metric = Callable[[Result], float]


@dataclass(frozen=True)
class ArmSummary:
    """Results of one arm on one task, at its chosen rate."""

    arm: str
    backend: str
    peer: bool
    control: bool  # a positive control, with more samples than the others
    cell: Cell | None  # the chosen shape and rate; None: no complete sweep yet
    on_edge: bool  # the best rate lies on the edge of the grid, after all extensions
    runs: list[Result]  # by seed
    sweep: dict[Cell, list[Result]]  # complete runs of the sweep's seeds

    def of(self, metric: Metric) -> Array:
        """A metric of each run: [seeds]."""
        return np.array([metric(run) for run in self.runs], dtype=np.float64)

    def against(self, other: ArmSummary, metric: Metric) -> Difference:
        """This arm minus the other, over their common seeds."""
        ours = {run.key.seed: metric(run) for run in self.runs}
        others = {run.key.seed: metric(run) for run in other.runs}
        common = sorted(ours.keys() & others.keys())
        return paired_difference(
            np.array([ours[seed] for seed in common], dtype=np.float64),
            np.array([others[seed] for seed in common], dtype=np.float64),
        )

    def samples(self, target: float) -> float:
        """Geometric mean over seeds of the samples to the target; a run that never reaches it counts its budget."""
        return float(np.exp(np.mean(np.log(self.of(lambda run: counted(run, target))))))

    def missed(self, target: float) -> int:
        """Runs that never reach the target."""
        return sum(math.isinf(run.samples_to(target)) for run in self.runs)


@dataclass(frozen=True)
class TaskSummary:
    """Results of all arms on one task."""

    task: str
    arms: list[ArmSummary]
    reference: ArmSummary
    target: float  # held-out accuracy
    best_peer: ArmSummary | None  # by samples to the target, then by area; choosing it from the results favours it
    share: float = math.nan  # of the way from the start to the best final accuracy, where the target is

    @classmethod
    def of(
        cls, task: str, arms: list[ArmSummary], reference: ArmSummary, share: float, *, by_peers: bool = False
    ) -> TaskSummary:
        """Choose target and best peer. `by_peers`: peers alone set the target."""
        peers = peers_of(arms)
        target = target_of(peers if by_peers else arms, share)
        best = min(peers, key=lambda arm: (arm.samples(target), -float(np.mean(arm.of(area)))), default=None)
        return cls(task, arms, reference, target, best, share)

    def greedy(self) -> TaskSummary:
        """The same with greedy accuracy in place of sampled accuracy; arms keep their shapes and rates."""
        arms = [
            replace(arm, runs=[replace(run, accuracy=run.greedy) for run in arm.runs])
            for arm in (*self.arms, self.reference)
        ]
        reference = next(arm for arm in arms if arm.arm == self.reference.arm)
        return self.of(self.task, arms[:-1], reference, self.share)

    @property
    def rises(self) -> bool:
        """Whether the target lies above the start, which it does unless every arm ends below it."""
        return any(self.target > np.mean([run.accuracy[0] for run in arm.runs]) for arm in self.seen)

    def to_the_peers_target(self) -> TaskSummary:
        """The same with a target that only peers set."""
        return self.of(self.task, self.arms, self.reference, self.share, by_peers=True)

    @property
    def seen(self) -> list[ArmSummary]:
        """Arms that have runs."""
        return [arm for arm in self.arms if arm.runs]

    def named(self, name: str) -> ArmSummary | None:
        """The arm of this name, if it has runs."""
        return next((arm for arm in self.seen if arm.arm == name), None)

    def saving(self, arm: ArmSummary, other: ArmSummary) -> Difference:
        """The other arm's samples to the target divided by this arm's, with the interval of that ratio.

        The test is on logarithms, paired by seed. A run that never reaches the target counts with its budget; `bound`
        says what the ratio is then.
        """
        found = other.against(arm, lambda run: math.log(counted(run, self.target)))
        interval = found.interval
        return replace(found, interval=Interval(*map(math.exp, (interval.mean, interval.low, interval.high))))

    def lead(self, arm: ArmSummary) -> Difference:
        """`saving` against the best peer. If the arm is ahead, p is the largest over all peers: it leads each of them.

        Without this, a peer that is nearly as good but varies more would not count. p is 1 where the ratio is only
        bounded on the wrong side: a lead by a ratio that may be smaller, a loss by one that may be larger.
        """
        assert self.best_peer is not None
        found, bound = self.saving(arm, self.best_peer), self.bound(arm, self.best_peer)
        ahead = found.interval.mean > 1
        if bound in (("<", "~") if ahead else (">", "~")):
            return replace(found, p=1.0)
        if not ahead:
            return found
        return replace(found, p=max(self.saving(arm, peer).p for peer in peers_of(self.arms)))

    def bound(self, arm: ArmSummary, other: ArmSummary) -> str:
        """What `saving` is if runs never reach the target.

        ">" (a lower bound) if these are runs of the other arm, "<" (an upper bound) if of this arm, "~" if of both.
        """
        if arm is other:
            return ""
        return (("", ">"), ("<", "~"))[arm.missed(self.target) > 0][other.missed(self.target) > 0]


def counted(run: Result, target: float) -> float:
    """Samples to the target, at least one step's; the budget if the run never reaches it."""
    return max(run.budget / run.num_steps, min(run.budget, run.samples_to(target)))


def peers_of(arms: Sequence[ArmSummary]) -> list[ArmSummary]:
    """The peers that have runs, without positive controls."""
    return [arm for arm in arms if arm.peer and not arm.control and arm.runs]


def target_of(arms: Sequence[ArmSummary], share: float) -> float:
    """A task's target: this share of the way from the mean accuracy at the start to the best mean final accuracy.

    Positive controls are left out, because they have more samples. NaN without runs.
    """
    means = [
        (float(np.mean([run.accuracy[0] for run in arm.runs])), float(np.mean(arm.of(final))))
        for arm in arms
        if arm.runs and not arm.control
    ]
    if not means:
        return math.nan
    start = float(np.mean([first for first, _ in means]))
    return start + share * (max(last for _, last in means) - start)


def summarise(plan: Plan, out: Path) -> list[TaskSummary]:
    """Summarise all complete runs; tasks without any are left out.

    Raises:
        UserError: no run is complete, or one is damaged.
    """
    tasks = []
    for task in plan.tasks:
        arms = [_arm(plan, out, task, name) for name in plan.arms_on(task)]
        reference = next((arm for arm in arms if arm.arm == plan.reference), None)
        tasks.append(TaskSummary.of(task, arms, reference or _arm(plan, out, task, plan.reference), plan.target_share))
    if not any(arm.runs or any(arm.sweep.values()) for task in tasks for arm in task.arms):
        raise UserError("no complete run to summarise", where=str(out), fix="run the study first")
    return [task for task in tasks if any(arm.runs or arm.sweep for arm in task.arms)]


def _arm(plan: Plan, out: Path, task: str, name: str) -> ArmSummary:
    if name not in plan.arms:  # the reference, under --only
        return ArmSummary(name, "toy", False, False, None, False, [], {})
    arm, selection = plan.arms[name], selection_of(plan, out, task, name, lambda cell: True)
    keys = [Key(task, name, selection.best, seed) for seed in plan.seeds] if selection.best is not None else []
    runs = [run for key in keys if (run := read_result(key, out))]
    swept = sweep_results(plan, out, task, name)
    return ArmSummary(name, arm.backend, arm.peer, arm.more_samples > 1, selection.best, selection.on_edge, runs, swept)


def area(run: Result) -> float:
    """Area under the curve."""
    return run.auc


def final(run: Result) -> float:
    """Sampled accuracy at the end."""
    return run.final


def final_greedy(run: Result) -> float:
    """Greedy accuracy at the end."""
    return run.final_greedy


def drop(run: Result) -> float:
    """Largest drop."""
    return run.drop


def environment() -> dict[str, Any]:
    """Date, machine and library versions, TRL's as well if it is installed."""
    trl = {"trl": version("trl")} if find_spec("trl") else {}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()} | package_versions() | trl,
    }


def write_runs(tasks: Sequence[TaskSummary], path: Path) -> None:
    """Write one line per run: sweep runs, then main runs."""
    rows = []
    for task in tasks:
        for arm in task.arms:
            phases = [("sweep", run) for runs in arm.sweep.values() for run in runs] + [("main", r) for r in arm.runs]
            rows += [_run_row(phase, arm.backend, run) for phase, run in phases]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _run_row(phase: str, backend: str, run: Result) -> dict[str, Any]:
    key = run.key
    metrics = {"area": run.auc, "final": run.final, "final_greedy": run.final_greedy, "largest_drop": run.drop}
    return {
        "phase": phase,
        "task": key.task,
        "arm": key.arm,
        "backend": backend,
        "shape": key.cell.shape,
        "lr": f"{key.cell.lr:g}",
        "seed": key.seed,
        **{name: f"{value:.6f}" for name, value in metrics.items()},
    }
