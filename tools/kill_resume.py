"""Kill training runs with SIGKILL, resume them, and check that they end like a run that was never killed.

    python tools/kill_resume.py --kills 50 --json run/kill_resume.json [--ranks 1 2] [--seed 0] [--model DIR]

For each number of ranks, one run is never killed ("unbroken"). Other runs save after every step and are killed and
resumed several times, at moments drawn from the seed: before the first step, in a step, while a checkpoint is written
or renamed, and while an older one is removed. The last start of each run may finish. Checks:

- metrics (except times and memory) and exported weights equal those of the unbroken run, bit for bit
- after every kill, each committed checkpoint is intact
- no process and no shared memory is left: launcher and ranks are killed, engines and reward workers must end themselves

The task is examples/tiny_cpu; without --model its model is made first. Prints a table; ends with status 1 if a check
fails. Run it on an otherwise idle machine, like tools/soak.py.
"""

from __future__ import annotations

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
from soak import ROOT, Task, certain, directory, environment, kills_parser, metrics_of, prepare, settings, write_json
from soak_watch import leaked, shared_memory_names

from oblr_megatron.checkpoint.store import CheckpointError, check_contents, checkpoints_of, read_manifest
from oblr_megatron.metrics import METRICS_FILE

PLAN = (WRITE, COMMIT, STEP, PRUNE, WRITE, COMMIT, STEP, WRITE, PRUNE, START)  # in turn
KILLS_A_RUN = 10
KEEP_LAST = 2
LIMIT_S = 240.0  # time limit of one start of a run
Result = TypeVar("Result")


@dataclass(slots=True)
class Run:
    """One run, from its first start to its end, and its problems."""

    name: str
    ranks: int
    steps: int
    status: int | None = None  # exit status of the last start; None: killed, or past its limit
    starts: int = 0
    seconds: float = 0.0
    hits: list[str] = field(default_factory=list)  # the moment of each kill, from what it left on disk
    problems: list[str] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether the run has neither ended nor failed a check."""
        return self.status is None and not self.problems


def main() -> int:
    """0 if every run passes its checks, else 1."""
    options = kills_parser(__doc__ or "", kills=50, ranks=[1, 2]).parse_args()
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


def kill_and_resume(task: Task, ranks: int, kills: int, draw: random.Random) -> list[Run]:
    """One unbroken run, then killed runs until the number of kills is reached or a check fails."""
    steps = 3 * min(kills, KILLS_A_RUN) + 4  # a killed start advances by up to three steps
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
    """Start or resume a run, follow it, and check that nothing is left behind."""
    run_dir = directory(task.out, run.name)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    if not checkpoints_of(run_dir):  # killed before the first one: a resume refuses to lose the steps done
        (run_dir / METRICS_FILE).unlink(missing_ok=True)
    before, begin = shared_memory_names(), time.monotonic()
    with run_dir.with_suffix(".log").open("ab") as log:
        job = subprocess.Popen(
            command_line(task, run, run_dir), env=environment(), stdout=log, stderr=log, start_new_session=True
        )
    attempt = Attempt(job, run_dir, LIMIT_S)
    result = follow(attempt)
    run.status = None if result in MOMENTS else job.poll()
    if job.poll() is None:
        run.problems.append(f"did not get there within {LIMIT_S:.0f} s")
    left = attempt.family.left_over()
    run.problems += [f"left over: process {process.pid}" for process in left]
    for process in left:
        process.kill()
    run.problems += [f"left over: /dev/shm/{name}" for name in leaked(shared_memory_names() - before)]
    run.starts, run.seconds = run.starts + 1, run.seconds + time.monotonic() - begin
    return result


def command_line(task: Task, run: Run, run_dir: Path) -> list[str]:
    """The command of one start; the same every time."""
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
    """Faults of the committed checkpoints."""
    problems = []
    for path in checkpoints_of(run_dir):
        try:
            manifest = read_manifest(path)
            check_contents(path, manifest, manifest.files)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def check_against(run: Run, out: Path, unbroken: Run) -> None:
    """Compare a finished run with the unbroken one."""
    ours, other = directory(out, run.name), directory(out, unbroken.name)
    if run.status != 0:
        run.problems.append(f"ended with status {run.status}: {_last_lines(ours)}")
        return
    found, expected = metrics_of(out, run.name), metrics_of(out, unbroken.name)
    wrong = [one["step"] for one, other in zip(found, expected, strict=False) if certain(one) != certain(other)]
    if wrong or len(found) != len(expected):
        run.problems.append(f"{len(found)} of {len(expected)} steps logged, {len(wrong)} of them differ: {wrong[:5]}")
    if exported(ours) != exported(other):
        run.problems.append("its weights differ from the unbroken run's")
    names = sorted(path.name for path in (ours / "checkpoints").iterdir())
    if len(names) != KEEP_LAST or any(name.startswith(".") for name in names):
        run.problems.append(f"unexpected checkpoints: {', '.join(names)}")
    run.problems += damaged(ours)


def exported(run_dir: Path) -> dict[str, bytes]:
    """Contents of the exported Hugging Face directory."""
    return {path.name: path.read_bytes() for path in sorted((run_dir / "hf").iterdir())}


def _last_lines(run_dir: Path) -> str:
    return " | ".join(run_dir.with_suffix(".log").read_text(encoding="utf-8", errors="replace").splitlines()[-3:])


def hits_of(runs: Sequence[Run]) -> list[str]:
    """Moments of all kills."""
    return [hit for run in runs for hit in run.hits]


def table(runs: Sequence[Run]) -> str:
    """One line per run, then the number of kills at each moment."""
    lines = [f"{'run':24} {'status':>6} {'starts':>6} {'seconds':>8}  killed in"]
    for run in runs:
        fault = "" if not run.problems else f"  WRONG: {'; '.join(run.problems)}"
        hits = ", ".join(run.hits)
        lines.append(f"{run.name:24} {run.status!s:>6} {run.starts:6} {run.seconds:8.0f}  {hits}{fault}")
    counts = Counter(hits_of(runs))
    lines.append(f"{sum(counts.values())} kills: " + ", ".join(f"{counts[moment]} in {moment}" for moment in MOMENTS))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
