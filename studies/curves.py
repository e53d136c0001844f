"""`oblr-megatron study curves`: learning curves with equal samples, each arm at the best rate of its own sweep.

sweep    arms x shapes (Q, G) x rates x sweep_seeds; the grid grows while the best rate lies on its edge
main     arms at their best cell (shape and rate) x seeds
summary  tables and charts of all complete runs
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from oblr_megatron.errors import EXIT_OK, EXIT_RUN, UserError
from oblr_megatron.formatting import duration
from oblr_megatron.metrics import write_whole
from oblr_megatron.observe.console import progress
from studies.curve_plots import write_charts
from studies.jobs import LOG_FILE, WORKER, Ended, Job, last_line, run_jobs, to_do
from studies.plan import Plan, load_plan, merged
from studies.recipe import prepare_recipe, read_recipe
from studies.results import Key, asked_of, is_whole, keys_on_disk, read_result, selection_of
from studies.rows import check_starts, keep, keep_all, mend, restore
from studies.summary import summarise, write_runs
from studies.sweep import Cell
from studies.tables import document

DEADLINE_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `study curves`."""
    parser.add_argument("plan", type=Path, metavar="PLAN.toml", help="tasks, seeds, sweep and arms")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="results; repeat the command to continue"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, metavar="N", help="parallel runs (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="ARM", help="run only these arms")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="only these tasks of the plan")
    parser.add_argument(
        "--deadline-s", type=float, default=DEADLINE_S, metavar="S", help="deadline of a run (default: %(default)s)"
    )
    parser.add_argument(
        "--beside",
        nargs=2,
        action="append",
        type=Path,
        default=[],
        metavar=("PLAN", "DIR"),
        help="put the tasks of another study with the same reference into the tables, and into their corrections of p",
    )
    parser.add_argument("--reference", metavar="ARM", help="compare with this arm in place of the plan's reference")
    parser.add_argument("--summary", action="store_true", help="only write tables and charts of the existing runs")
    parser.set_defaults(function=study_curves)


def study_curves(options: argparse.Namespace) -> int:
    """Do the missing runs and write the summary; status 1 if a run failed.

    Raises:
        UserError: a bad plan or option, a missing library, or a directory with runs of another plan.
    """
    from oblr_megatron.checks.packages import require_for_studies

    require_for_studies("matplotlib", "scipy")
    whole = load_plan(options.plan).compared_with(options.reference)
    plan = whole.only(options.only, options.tasks)
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs} is less than 1", where="command line", fix="give 1 or more")
    out = options.out.resolve()
    others = [beside(plan, path, directory, options.reference) for path, directory in options.beside]
    with nullcontext() if options.summary else claimed(out):  # a summary may be written while the study runs
        restore(whole, out)
        starts = dict.fromkeys(plan.tasks, out / "start") if options.summary else prepared(plan, out)
        study = Curves(plan, out, starts, processes=options.jobs, deadline_s=options.deadline_s)
        if options.summary:
            study.check()
        else:
            check_starts(out, starts)
            keep_all(whole, out)
            runs = plan.fewest_runs()
            print(f"{runs} runs, more if a sweep adds rates; finished ones are kept", flush=True)
            study.run()
        for path in write_summary(plan, out, others):
            print(path)
    for ended in study.failed:
        print(f"failed: {ended.job.key}: {ended.fault} [{ended.job.run_dir}]", file=sys.stderr)
    return EXIT_RUN if study.failed else EXIT_OK


def beside(plan: Plan, path: Path, directory: Path, reference: str | None = None) -> tuple[Plan, Path]:
    """Plan and directory of another study. The tables show its tasks, too; `reference` replaces its own.

    Raises:
        UserError: it has another reference or a task of this plan; no complete run; or runs of another plan.
    """
    other, out = load_plan(path).compared_with(reference), directory.resolve()
    if other.reference != plan.reference:
        what = f"its reference is {other.reference!r}, the study's is {plan.reference!r}"
        raise UserError(what, where=str(path), fix="name a plan with the same reference")
    if both := sorted(set(plan.tasks) & set(other.tasks)):
        raise UserError(f"both plans have the task {both[0]}", where=str(path), fix="name a plan of other tasks")
    restore(other, out)
    Curves(other, out, dict.fromkeys(other.tasks, out / "start"), processes=1).check()
    summarise(other, out)
    return other, out


def write_summary(plan: Plan, out: Path, others: Sequence[tuple[Plan, Path]] = ()) -> list[Path]:
    """Write summary.md, runs.csv and the charts; returns their paths, summary.md first.

    Args:
        plan: the study's plan.
        out: its directory.
        others: studies whose tasks are put into the tables, too.

    Raises:
        UserError: no run is complete.
    """
    tasks = [task for each in ((plan, out), *others) for task in summarise(*each)]
    write_runs(tasks, out / "runs.csv")
    charts = write_charts(tasks, out)
    unfinished = "".join(incomplete(directory) for _, directory in ((plan, out), *others))
    write_whole(out / "summary.md", document(plan, tasks, [other for other, _ in others]) + unfinished)
    return [out / "summary.md", out / "runs.csv", *charts]


def incomplete(out: Path) -> str:
    """A list of the runs that were started and are not complete, with the last line that each printed."""
    lines = []
    for log in sorted(out.glob(f"*/*/*x*/lr*/seed*/{LOG_FILE}")):
        asked = asked_of(log.parent)
        if asked and not is_whole(log.parent, asked["backend"], int(asked["config"]["num_steps"])):
            lines.append(f"- {log.parent.relative_to(out)}: {last_line(log)}\n")
    return "\n## Runs that failed, or are not finished\n\n" + "".join(lines) if lines else ""


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Lock the directory for one study at a time.

    Raises:
        UserError: another study is running in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fix = "wait for it, or give another --out"
            raise UserError("another study is running here", where=str(out), fix=fix) from None
        mend(out)
        yield


def prepared(plan: Plan, out: Path) -> dict[str, Path]:
    """Task -> start (warm-started model and data), made if missing."""
    import torch

    from studies.start import prepare

    torch.set_num_threads(1)  # the models are tiny; on a busy machine several threads wait for each other
    with progress("starts", len(plan.tasks)) as advance:
        starts = {}
        for task in plan.tasks:
            if recipe := plan.recipes.get(task):
                starts[task] = prepare_recipe(task, recipe, out / "start")
            else:
                starts[task] = prepare(task, plan.skill, out / "start", seed=plan.start_seed)
            advance(1)
    return starts


class Curves:
    """Does the runs of a study.

    Args:
        plan: the study's plan.
        out: directory of the results.
        starts: task -> start of its runs.
        processes: largest number of parallel runs.
        deadline_s: of each run, seconds.
        worker: command that does a run, called with the path of its asked.json.
    """

    def __init__(
        self,
        plan: Plan,
        out: Path,
        starts: Mapping[str, Path],
        *,
        processes: int,
        deadline_s: float = DEADLINE_S,
        worker: Sequence[str] = WORKER,
    ) -> None:
        self.plan, self.out, self.starts = plan, out, starts
        self.failed: list[Ended] = []
        self._processes, self._deadline_s, self._worker = processes, deadline_s, worker

    def run(self) -> None:
        """Do both phases, one task after the other; failed runs are in `failed`.

        Raises:
            UserError: a run is complete but belongs to another plan.
        """
        for task in self.plan.tasks:
            done: set[tuple[str, Cell]] = set()
            while wanted := [each for each in self._sweep_cells(task, done) if each not in done]:
                keys = [Key(task, *each, seed) for each in wanted for seed in self.plan.sweep_seeds]
                self._run(f"{task} sweep", keys)
                done |= set(wanted)
            self._run(f"{task} main", self._main_keys(task))

    def check(self) -> None:
        """Check that all complete runs belong to this plan.

        Raises:
            UserError: a run is complete but belongs to another plan.
        """
        to_do(self.job(key) for key in keys_on_disk(self.plan, self.out))

    def job(self, key: Key) -> Job:
        """The run as a job."""
        run_dir = key.run_dir(self.out)
        return Job(key, run_dir, self.plan.arms[key.arm].backend, self._config(key, run_dir), self._worker)

    def _config(self, key: Key, run_dir: Path) -> dict[str, Any]:
        """The run's ToyConfig as JSON."""
        from oblr_megatron.config import validated
        from studies.toy_trainer import ToyConfig

        plan, recipe = self.plan, None
        if key.task in plan.recipes:
            model = merged(plan.model, plan.arms[key.arm].model)
            recipe = merged(read_recipe(key.task, plan.recipes[key.task]).table, {"model": model})
        table = {
            "task": key.task,
            "skill": plan.skill,
            "start_dir": str(self.starts[key.task]),
            "recipe": recipe,
            "run_dir": str(run_dir),
            "seed": key.seed,
            "train_rows": plan.train_rows,
            "num_steps": plan.num_steps,
            "num_prompts": key.cell.num_prompts,
            "group_size": key.cell.group_size,
            "temperature": plan.temperature,
            "evaluate_every": plan.evaluate_every,
            "evaluation_samples": plan.evaluation_samples,
            "norm_source": plan.arms[key.arm].norm_source,
            "rival": plan.arms[key.arm].rival,
            "algo": plan.algo(key.arm),
            "optimizer": merged(plan.optimizer(key.arm), {"lr": key.cell.lr}),
        }
        return validated(ToyConfig, table, f"plan: arms.{key.arm}").model_dump(mode="json")

    def _sweep_cells(self, task: str, done: set[tuple[str, Cell]]) -> Iterator[tuple[str, Cell]]:
        """(arm, cell) of all cells that the task's sweeps need so far."""
        for arm in self.plan.arms_on(task):
            if self.plan.swept(arm):
                settled = {cell for swept, cell in done if swept == arm}
                selection = selection_of(self.plan, self.out, task, arm, settled.__contains__)
                yield from ((arm, cell) for cell in selection.cells)

    def _main_keys(self, task: str) -> list[Key]:
        """Every arm at its best cell, with all seeds. An arm without a complete cell has no runs."""
        best = {
            arm: selection_of(self.plan, self.out, task, arm, lambda cell: True).best for arm in self.plan.arms_on(task)
        }
        return [Key(task, arm, cell, seed) for arm, cell in best.items() if cell for seed in self.plan.seeds]

    def _run(self, phase: str, keys: Sequence[Key]) -> None:
        """Do the missing runs; print one line per run."""
        jobs = to_do(self.job(key) for key in keys)
        print(f"{phase}: {len(jobs)} of {len(keys)} runs to do", flush=True)
        with progress(phase, len(jobs)) as advance:
            count, began = 0, time.monotonic()

            def report(ended: Ended) -> None:
                nonlocal count
                count += 1
                advance(1)
                if not ended.fault:
                    keep(ended.job.key, self.out)
                left = duration((time.monotonic() - began) / count * (len(jobs) - count))
                print(f"{phase} {count}/{len(jobs)}, {left} left  {line_of(ended, self.out)}", flush=True)

            self.failed += run_jobs(jobs, processes=self._processes, deadline_s=self._deadline_s, report=report)


def line_of(ended: Ended, out: Path) -> str:
    """One line about a run that ended."""
    key = ended.job.key
    result = None if ended.fault else read_result(key, out)
    if result is None:
        return f"{key}  FAILED: {ended.fault}"
    return f"{key}  area {result.auc:.3f}  final {result.final:.3f}  {duration(ended.seconds)}"
