"""Kill whole training runs with SIGKILL, resume them, and check that they end as one that was left alone.

    python tools/kill_resume.py --kills 50 --json run/kill_resume.json [--ranks 1 2] [--seed 0] [--model DIR]

For each number of ranks: one run that is left alone; then runs that save after every step and are killed, resumed and
killed again, at moments drawn from the seed: in a step, while a checkpoint is being written, gets its name, or an older
one goes, and before the first step. The last start of each is left alone. Its metrics must be those of the first run to
the last bit (times and memory aside), and so must the weights it exports. After every kill each checkpoint that has a
name must be whole, and no process and no shared memory may be left: launcher and ranks are killed, their engines and
reward workers must end by themselves. The task is examples/tiny_cpu's; without --model its model is made first.
Prints a table; ends with status 1 if anything was wrong. To be run where nothing else is, as tools/soak.py.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from kill_watch import COMMIT, MOMENTS, PRUNE, START, STEP, WRITE, Attempt
from soak import ROOT, Task, certain, directory, environment, metrics_of, prepare, settings, write_json
from soak_watch import leaked, shared_memory_names

from oblr_megatron.checkpoint.store import CheckpointError, check_contents, checkpoints_of, read_manifest

PLAN = (WRITE, COMMIT, STEP, PRUNE, WRITE, COMMIT, STEP, WRITE, PRUNE, START)  # by turns
KILLS_A_RUN = 10
KEEP_LAST = 2
LIMIT_S = 240.0  # of one start of a run
Result = TypeVar("Result")


@dataclass(slots=True)
class Run:
    """How one run went from its first start to its end, and what was wrong with it."""

    name: str
    ranks: int
    steps: int
    status: int | None = None  # of its last start; None: it was killed, or did not end within its limit
    starts: int = 0
    seconds: float = 0.0
    hits: list[str] = field(default_factory=list)  # the moments of its kills, by what they left on the disk
    problems: list[str] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether it has neither ended nor gone wrong."""
        return self.status is None and not self.problems


def main() -> int:
    """0 when every run did what it must."""
    options = _parser().parse_args()
    os.chdir(ROOT)  # the config's paths are relative to the repository
    with TemporaryDirectory(prefix="oblr-kill-") as scratch:
        model = options.model or prepare(Path(scratch))
        task = Task(model, options.data or model.parent, options.out or Path(scratch), tuple(options.overrides))
        runs: list[Run] = []
        for position, ranks in enumerate(options.ranks):
            share = options.kills * (position + 1) // len(options.ranks) - len(hits_of(runs))
            runs += kill_and_resume(task, ranks, share, random.Random(f"{options.seed}/{ranks}"))
    print(table(runs), flush=True)
    if options.json is not None:
        write_json(options.json, runs, Counter(hits_of(runs)))
    problems = [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    if len(hits_of(runs)) < options.kills:
        problems.append(f"only {len(hits_of(runs))} kills of {options.kills}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="over all runs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of trainer ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--model", type=Path, help="Hugging Face directory of examples/tiny_cpu/prepare.py")
    parser.add_argument("--data", type=Path, help="directory of its train.jsonl; by default the one above the model")
    parser.add_argument("--out", type=Path, help="keep the runs' directories here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the runs' config")
    return parser


def kill_and_resume(task: Task, ranks: int, kills: int, draw: random.Random) -> list[Run]:
    """The run that is left alone, and others until there were so many kills, or one went wrong."""
    steps = 3 * min(kills, KILLS_A_RUN) + 4  # a start that is killed comes up to three steps further
    unbroken = Run(f"{ranks} ranks, unbroken", ranks, steps)
    usual = start(task, unbroken, Attempt.measure)
    runs, done = [unbroken], 0
    if unbroken.status != 0:
        unbroken.problems.append(f"ended with status {unbroken.status}")
    while done < kills and not runs[-1].problems:
        run = Run(f"{ranks} ranks, killed {len(runs)}", ranks, steps)
        for number in range(done, min(done + KILLS_A_RUN, kills)):
            if run.goes_on:
                hit = start(task, run, partial(Attempt.kill, moment=PLAN[number % len(PLAN)], usual=usual, draw=draw))
                run.hits += [hit] if hit else []
                run.problems += damaged(directory(task.out, run.name))
        if run.goes_on:
            start(task, run, Attempt.wait_for_end)
        check_against(run, task.out, unbroken)
        runs.append(run)
        done += max(1, len(run.hits))
    return runs


def start(task: Task, run: Run, follow: Callable[[Attempt], Result]) -> Result:
    """Start a run, or go on with it; whatever it is followed to, nothing of it may be left afterwards."""
    run_dir = directory(task.out, run.name)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    before, begin = shared_memory_names(), time.monotonic()
    with run_dir.with_suffix(".log").open("ab") as log:
        job = subprocess.Popen(
            command_line(task, run, run_dir), env=environment(), stdout=log, stderr=log, start_new_session=True
        )
    attempt = Attempt(job, run_dir, LIMIT_S)
    result = follow(attempt)
    run.status = None if result in MOMENTS else job.poll()
    if job.poll() is None:
        run.problems.append(f"did not come so far within {LIMIT_S:.0f} s")
    left = attempt.family.left_over()
    run.problems += [f"left over: process {process.pid}" for process in left]
    for process in left:
        process.kill()
    run.problems += [f"left over: /dev/shm/{name}" for name in leaked(shared_memory_names() - before)]
    run.starts, run.seconds = run.starts + 1, run.seconds + time.monotonic() - begin
    return result


def command_line(task: Task, run: Run, run_dir: Path) -> list[str]:
    """Of one start: the same every time."""
    given = settings(
        task,
        run_dir,
        run.steps,
        checkpoint__every_steps=1,
        checkpoint__keep_last=KEEP_LAST,
        checkpoint__export_hf="true",
    )
    command = [sys.executable, "-m", "oblr_megatron.cli", "train", "examples/tiny_cpu/config.toml", *given]
    return [*command, *task.overrides, "--resume", "--nproc-per-node", str(run.ranks)]


def damaged(run_dir: Path) -> list[str]:
    """What is wrong with the checkpoints that have a name."""
    problems = []
    for path in checkpoints_of(run_dir):
        try:
            manifest = read_manifest(path)
            check_contents(path, manifest, manifest.files)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def check_against(run: Run, out: Path, unbroken: Run) -> None:
    """Hold a run's end against that of the one that was left alone."""
    ours, theirs = directory(out, run.name), directory(out, unbroken.name)
    if run.status != 0:
        run.problems.append(f"ended with status {run.status}: {_last_lines(ours)}")
        return
    found, expected = metrics_of(out, run.name), metrics_of(out, unbroken.name)
    wrong = [one["step"] for one, other in zip(found, expected, strict=False) if certain(one) != certain(other)]
    if wrong or len(found) != len(expected):
        run.problems.append(
            f"{len(found)} steps logged of {len(expected)}, {len(wrong)} of them otherwise: {wrong[:5]}"
        )
    if exported(ours) != exported(theirs):
        run.problems.append("its weights are not those of the unbroken run")
    names = sorted(path.name for path in (ours / "checkpoints").iterdir())
    if len(names) != KEEP_LAST or any(name.startswith(".") for name in names):
        run.problems.append(f"left in its checkpoints: {', '.join(names)}")
    run.problems += damaged(ours)


def exported(run_dir: Path) -> dict[str, bytes]:
    """The files of the Hugging Face directory."""
    return {path.name: path.read_bytes() for path in sorted((run_dir / "hf").iterdir())}


def _last_lines(run_dir: Path) -> str:
    return " | ".join(run_dir.with_suffix(".log").read_text(encoding="utf-8", errors="replace").splitlines()[-3:])


def hits_of(runs: Sequence[Run]) -> list[str]:
    """The moments of all kills."""
    return [hit for run in runs for hit in run.hits]


def table(runs: Sequence[Run]) -> str:
    """One line a run, and how many kills fell into each moment."""
    lines = [f"{'run':24} {'status':>6} {'starts':>6} {'seconds':>8}  killed in"]
    for run in runs:
        verdict = "" if not run.problems else f"  WRONG: {'; '.join(run.problems)}"
        hits = ", ".join(run.hits)
        lines.append(f"{run.name:24} {run.status!s:>6} {run.starts:6} {run.seconds:8.0f}  {hits}{verdict}")
    counts = Counter(hits_of(runs))
    lines.append(f"{sum(counts.values())} kills: " + ", ".join(f"{counts[moment]} in {moment}" for moment in MOMENTS))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
