"""Result files of a study's runs: paths, configs and learning curves. Imports no torch.

DIR/{task}/{arm}/{Q}x{G}/lr{rate:g}/seed{n}/asked.json    backend and config
                                            log.txt       output of the run
                                            metrics.jsonl (backend "train": in the subdirectory train/)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oblr_megatron.errors import UserError
from oblr_megatron.formatting import flatten
from oblr_megatron.metrics import METRICS_FILE, read_metrics
from studies.plan import Plan
from studies.statistics import Array, area_under_curve, largest_drop, steps_to
from studies.sweep import Cell, Selection, select

ASKED_FILE = "asked.json"
PLACES = ("run_dir", "start_dir")  # paths may change: a study can be moved
MEASURED = {"mean_at_k", "accuracy"}  # values of an evaluation that a curve needs
COSTS = ("timing_s/step", "timing_s/gradient", "timing_s/push", "perf/peak_memory_bytes", "grad_norm")


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies a run. Example: Key("sums", "rloo", Cell(8, 8, 1e-3), 0)."""

    task: str
    arm: str
    cell: Cell
    seed: int

    def run_dir(self, out: Path) -> Path:
        """The run's directory below the study's."""
        return out / self.task / self.arm / str(self.cell) / f"seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.task} {self.arm} {self.cell.shape} lr {self.cell.lr:g} seed {self.seed}"


@dataclass(frozen=True)
class Result:
    """The learning curve of a complete run. Accuracies are on the held-out set, between 0 and 1."""

    key: Key
    steps: Array  # [n] steps of the evaluations
    accuracy: Array  # [n] mean over responses sampled at the training temperature
    greedy: Array  # [n]
    num_steps: int
    solved: Array  # [n] pass@k; NaN where the backend does not report it
    entropy: Array  # [n] nats a token, of the samples of the next step; at the end of the last step
    costs: dict[str, float]  # by COSTS: median over the steps; NaN where the backend does not report it

    @property
    def auc(self) -> float:
        """Mean height of the curve of sampled accuracy."""
        return area_under_curve(self.steps, self.accuracy, self.num_steps)

    @property
    def final(self) -> float:
        """Sampled accuracy at the last step."""
        return float(self.accuracy[-1])

    @property
    def final_greedy(self) -> float:
        """Greedy accuracy at the last step."""
        return float(self.greedy[-1])

    @property
    def drop(self) -> float:
        """Largest fall of the sampled accuracy below its earlier maximum."""
        return largest_drop(self.accuracy)

    def samples_to(self, target: float) -> float:
        """Training samples until the curve first reaches the target; infinite if it never does."""
        return steps_to(self.steps, self.accuracy, target) * self.key.cell.num_prompts * self.key.cell.group_size

    def when(self, target: float, values: Array) -> float:
        """One of the curves [n] where the accuracy first reaches the target; NaN if it never does."""
        at = steps_to(self.steps, self.accuracy, target)
        return float(np.interp(at, self.steps, values)) if at < math.inf else math.nan

    @property
    def budget(self) -> float:
        """Training samples of the whole run."""
        return self.num_steps * self.key.cell.num_prompts * self.key.cell.group_size


def metrics_dir(run_dir: Path, backend: str) -> Path:
    """Directory of a run's metrics.jsonl. The real stack needs a directory of its own."""
    return run_dir / "train" if backend == "train" else run_dir


def asked_of(run_dir: Path) -> dict[str, Any] | None:
    """{"backend": ..., "config": {...}} of a run that was started; None if there is no run.

    Raises:
        UserError: the directory holds something else. The study does not remove it.
    """
    path = run_dir / ASKED_FILE
    if not path.exists():
        if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
            raise UserError(f"not a run of a study: {ASKED_FILE} is missing", where=str(run_dir), fix="move it away")
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"not a JSON object: {error}", where=str(path), fix="remove the run's directory") from error


def is_whole(run_dir: Path, backend: str, num_steps: int) -> bool:
    """Whether metrics.jsonl holds the evaluations of the start and of the last step."""
    directory = metrics_dir(run_dir, backend)
    if not (directory / METRICS_FILE).exists():
        return False
    measured = {record["step"] for record in read_metrics(directory) if _evaluated(record) >= MEASURED}
    return {0, num_steps} <= measured


def _evaluated(record: dict[str, Any]) -> set[str]:
    """Names of the evaluation's values in the record, without the set's."""
    return {name.rpartition("/")[2] for name, value in record.items() if name.startswith("eval/") and value is not None}


def first_difference(asked: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The first field, other than a path, in which two asked.json differ, with both values."""
    wanted, present = _comparable(asked), _comparable(found)
    for name in dict.fromkeys((*wanted, *present)):
        if name not in wanted or name not in present or wanted[name] != present[name]:
            return f"{name} is {_shown(present, name)}, the plan asks for {_shown(wanted, name)}"
    return None


def _comparable(asked: dict[str, Any]) -> dict[str, Any]:
    flat = flatten({"backend": asked.get("backend"), **asked.get("config", {})})
    return {name: value for name, value in flat.items() if name not in PLACES}


def _shown(flat: dict[str, Any], name: str) -> str:
    return repr(flat[name]) if name in flat else "absent"


def read_result(key: Key, out: Path) -> Result | None:
    """The run's curve; None while the run is incomplete.

    Raises:
        UserError: its files are damaged, or it evaluated another task.
    """
    run_dir = key.run_dir(out)
    asked = asked_of(run_dir)
    if asked is None:
        return None
    backend, num_steps = asked["backend"], int(asked["config"]["num_steps"])
    if not is_whole(run_dir, backend, num_steps):
        return None
    records = read_metrics(metrics_dir(run_dir, backend))
    sampled, greedy = f"eval/{key.task}/mean_at_k", f"eval/{key.task}/accuracy"
    solved = f"eval/{key.task}/pass_at_k"
    entropies = [record.get("entropy", math.nan) for record in records]
    following = entropies[1:] + entropies[-1:]
    points = [
        (record["step"], record[sampled], record[greedy], record.get(solved, math.nan), entropy)
        for record, entropy in zip(records, following, strict=True)
        if record.get(sampled) is not None and record.get(greedy) is not None
    ]
    if not points or points[0][0] != 0 or points[-1][0] != num_steps:
        what = f"{sampled} or {greedy} is missing at step 0 or {num_steps}, where other evaluations are"
        raise UserError(what, where=str(run_dir), fix="remove the run's directory and its line in rows.jsonl")
    steps, accuracy, greedily, solved_any, entropy = np.array(points, dtype=np.float64).T
    costs = {name: float(np.median([record.get(name, math.nan) for record in records[1:]])) for name in COSTS}
    return Result(key, steps, accuracy, greedily, num_steps, solved_any, entropy, costs)


def cells_on_disk(out: Path, task: str, arm: str) -> list[Cell]:
    """The cells of the arm that have a directory, ascending."""
    root = out / task / arm
    return sorted(Cell.parse(str(path.relative_to(root))) for path in root.glob("*x*/lr*"))


def keys_on_disk(plan: Plan, out: Path) -> list[Key]:
    """The plan's runs that have a directory, complete or not."""
    return [
        Key(task, arm, cell, int(seed.name.removeprefix("seed")))
        for task in plan.tasks
        for arm in plan.arms_on(task)
        for cell in cells_on_disk(out, task, arm)
        for seed in sorted((out / task / arm / str(cell)).glob("seed*"))
    ]


def sweep_results(plan: Plan, out: Path, task: str, arm: str) -> dict[Cell, list[Result]]:
    """Complete runs of the sweep's seeds by cell. A cell that was started but has no complete run has an empty list."""
    keys = {cell: [Key(task, arm, cell, seed) for seed in plan.sweep_seeds] for cell in cells_on_disk(out, task, arm)}
    return {
        cell: [result for key in keys[cell] if (result := read_result(key, out))]
        for cell in keys
        if any(key.run_dir(out).exists() for key in keys[cell])
    }


def selection_of(plan: Plan, out: Path, task: str, arm: str, settled: Callable[[Cell], bool]) -> Selection:
    """State of an arm's sweep.

    Args:
        settled: cell -> whether it has failed if it is incomplete, rather than being still to run.
    """
    means = {}
    for cell, results in sweep_results(plan, out, task, arm).items():
        if len(results) == len(plan.sweep_seeds):
            means[cell] = float(np.mean([result.auc for result in results]))
        elif settled(cell):
            means[cell] = float("nan")
    return select(plan.shapes_of(arm), plan.grid(arm), plan.grid_extensions, plan.grid_refinements, means)
