"""`oblr-megatron study curves`: arms x seeds with equal samples, each arm at the best rate of its own sweep.

sweep    every arm x every rate x sweep_seeds; where the best rate lies on the edge, the grid grows
main     every arm at its best rate x seeds
summary  tables and figures of whatever is whole
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oblr_megatron.errors import EXIT_OK, EXIT_RUN, UserError
from oblr_megatron.formatting import duration
from oblr_megatron.metrics import write_whole
from oblr_megatron.observe.console import progress
from studies.curve_plots import write_charts
from studies.jobs import WORKER, Ended, Job, run_jobs, to_do
from studies.plan import Plan, load_plan, merged
from studies.results import Key, choice_of, metrics_dir, read_result
from studies.summary import as_json, summarise, write_runs
from studies.tables import document

DEADLINE_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("plan", type=Path, metavar="PLAN.toml", help="tasks, seeds, sweep and arms")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the same command again goes on here")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, metavar="N", help=f"runs at once; here {cores} by default")
    parser.add_argument("--only", nargs="+", default=[], metavar="ARM", help="these arms, and those they take rates of")
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S, metavar="S", help="of one run; 1800 by default")
    parser.add_argument("--summary", action="store_true", help="run nothing: tables and figures of what is there")
    parser.set_defaults(function=study_curves)


def study_curves(options: argparse.Namespace) -> int:
    """Run what is missing, write the summary; status 1 if a run failed.

    Raises:
        UserError: a bad plan or option, a library is missing, or the directory holds runs of another plan.
    """
    from oblr_megatron.checks.packages import require_scipy

    require_scipy()
    plan = load_plan(options.plan)
    plan = plan.only(options.only) if options.only else plan
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs} is no number of processes", fix="give 1 or more")
    out = options.out.resolve()
    with claimed(out):
        starts = dict.fromkeys(plan.tasks, out / "start") if options.summary else prepared(plan, out)
        study = Curves(plan, out, starts, processes=options.jobs, deadline_s=options.deadline_s)
        if options.summary:
            study.check()
        else:
            study.run()
        for path in write_summary(plan, out):
            print(path)
    for ended in study.failed:
        print(f"failed: {ended.job.key}: {ended.fault} [{ended.job.run_dir}]", file=sys.stderr)
    return EXIT_RUN if study.failed else EXIT_OK


def write_summary(plan: Plan, out: Path) -> list[Path]:
    """Write summary.md, summary.json, runs.csv and the charts; returns their paths, summary.md first.

    Raises:
        UserError: no run is complete.
    """
    tasks = summarise(plan, out)
    write_whole(out / "summary.json", json.dumps(as_json(plan, tasks), indent=1, allow_nan=False) + "\n")
    write_runs(tasks, out / "runs.csv")
    charts = write_charts(tasks, out)
    write_whole(out / "summary.md", document(plan, tasks))
    return [out / "summary.md", out / "summary.json", out / "runs.csv", *charts]


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """The directory, for one study at a time.

    Raises:
        UserError: another one is at work in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                "a study is at work here", where=str(out), fix="wait for it, or give another --out"
            ) from None
        yield


def prepared(plan: Plan, out: Path) -> dict[str, Path]:
    """The tasks' warm-started models and data, made where they are missing."""
    from studies.start import prepare

    with progress("starts", len(plan.tasks)) as advance:
        starts = {}
        for task in plan.tasks:
            starts[task] = prepare(task, plan.skill, out / "start")
            advance(1)
    return starts


class Curves:
    """A study's runs.

    Args:
        starts: of each task, where its runs begin.
        processes: runs at once.
        deadline_s: of one run.
        worker: the command that does a run; called with the path of its asked.json.
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
        """Both phases; failed runs are in `failed`.

        Raises:
            UserError: a run is whole, but of another plan.
        """
        done: set[tuple[str, str, float]] = set()
        while wanted := [each for each in self._sweep_rates(done) if each not in done]:
            keys = [Key(*each, seed) for each in wanted for seed in self.plan.sweep_seeds]
            self._run("sweep", keys)
            done |= set(wanted)
        self._run("main", self._main_keys())

    def check(self) -> None:
        """That what is there is of this plan.

        Raises:
            UserError: a run is whole, but of another plan.
        """
        keys = [
            Key(task, arm.name, float(rate.name.removeprefix("lr")), int(seed.name.removeprefix("seed")))
            for task in self.plan.tasks
            for arm in (self.out / task).glob("*")
            if arm.name in self.plan.arms
            for rate in arm.glob("lr*")
            for seed in rate.glob("seed*")
        ]
        to_do(self.job(key) for key in keys)

    def job(self, key: Key) -> Job:
        """The run as a job, with the run whose rates it takes."""
        arm = self.plan.arms[key.arm]
        needs = self.job(Key(key.task, arm.rates_of, key.lr, key.seed)) if arm.rates_of else None
        run_dir = key.run_dir(self.out)
        config = self._config(key, run_dir, metrics_dir(needs.run_dir, needs.backend) if needs else None)
        return Job(key, run_dir, arm.backend, config, needs, self._worker)

    def _config(self, key: Key, run_dir: Path, schedule_from: Path | None) -> dict[str, Any]:
        """The LabConfig, whole, as JSON."""
        from oblr_megatron.config import validated
        from studies.toy_trainer import ToyConfig

        plan = self.plan
        rates = {"schedule_from": str(schedule_from)} if schedule_from else {}
        table = {
            "task": key.task,
            "skill": plan.skill,
            "start_dir": str(self.starts[key.task]),
            "run_dir": str(run_dir),
            "seed": key.seed,
            "num_steps": plan.num_steps,
            "num_prompts": plan.num_prompts,
            "group_size": plan.group_size,
            "temperature": plan.temperature,
            "evaluate_every": plan.evaluate_every,
            "algo": merged(plan.algo(key.arm), rates),
            "optimizer": merged(plan.optimizer(key.arm), {"lr": key.lr}),
        }
        return validated(ToyConfig, table, f"plan: arms.{key.arm}").model_dump(mode="json")

    def _sweep_rates(self, done: set[tuple[str, str, float]]) -> Iterator[tuple[str, str, float]]:
        """Task, arm and rate of all that the sweeps ask for so far."""
        for task in self.plan.tasks:
            for arm in self.plan.arms:
                if self.plan.swept(arm):
                    settled = {rate for *whose, rate in done if whose == [task, arm]}
                    choice = choice_of(self.plan, self.out, task, arm, settled.__contains__)
                    yield from ((task, arm, rate) for rate in choice.rates)

    def _main_keys(self) -> list[Key]:
        """Every arm at its rate, with all seeds; an arm of which no rate ran through has none."""
        keys = []
        for task in self.plan.tasks:
            for arm in self.plan.arms:
                best = choice_of(self.plan, self.out, task, arm, lambda rate: True).best
                keys += [Key(task, arm, best, seed) for seed in self.plan.seeds] if best is not None else []
        return keys

    def _run(self, phase: str, keys: Sequence[Key]) -> None:
        """What of these is missing, with a line for each run that ends."""
        jobs = to_do(self.job(key) for key in keys)
        print(f"{phase}: {len(jobs)} runs, {len(keys)} asked for", flush=True)
        with progress(phase, len(jobs)) as advance:
            count = 0

            def report(ended: Ended) -> None:
                nonlocal count
                count += 1
                advance(1)
                print(f"{phase} {count}/{len(jobs)}  {line_of(ended, self.out)}", flush=True)

            self.failed += run_jobs(jobs, processes=self._processes, deadline_s=self._deadline_s, report=report)


def line_of(ended: Ended, out: Path) -> str:
    """How a run went."""
    key = ended.job.key
    result = None if ended.fault else read_result(key, out)
    if result is None:
        return f"{key}  FAILED: {ended.fault}"
    return f"{key}  area {result.auc:.3f}  final {result.final:.3f}  {duration(ended.seconds)}"
