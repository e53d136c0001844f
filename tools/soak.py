"""Kill the rollout engine of real training runs repeatedly with SIGKILL, and check that the results do not change.

    python tools/soak.py --kills 30 --json run/soak.json [--ranks 2 1] [--seed 0] [--model DIR]

For each number of ranks:

- one run is never killed ("unbroken")
- other runs have a few kills each, in phases and after delays drawn from the seed; they must end with status 0 and with
  the metrics of the unbroken run, bit for bit (except times and restarts)
- one run allows no restart; it must end with status 1 within its deadlines and name the cause

No process, shared memory, descriptor or zombie may be left. The task is examples/tiny_cpu; without --model its model is
made first. Prints a table; ends with status 1 if a check fails. Run it on an otherwise idle machine: semaphores of
other programs in /dev/shm look leaked while no process has them open.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from soak_watch import Family, Holdings, leaked, shared_memory_names

from oblr_megatron.checkpoint.store import checkpoints_of

ROOT = Path(__file__).resolve().parents[1]
ROLLOUT, PUSH, IDLE = PHASES = ("rollout", "push", "idle")
KILLS_A_RUN = 5
FIRST_STEP = 1  # steps before the first kill
DEADLINES = {"start_timeout_s": 180, "generate_timeout_s": 120, "push_timeout_s": 60}
DOUBTFUL = ("timing_s/", "perf/", "rollout/restarts")
"""Prefixes of metrics that may differ from the unbroken run's."""
NO_RESTART = ("rollout.max_restarts=0", "checkpoint.export_hf=true")
POLL_S = 0.0005
TYPICAL_S = {ROLLOUT: 0.2, PUSH: 0.01, IDLE: 0.2}  # upper bounds of delays, unless the unbroken run measured them


@dataclass(frozen=True, slots=True)
class Kill:
    """One planned kill. Example: Kill(step=3, phase="push", delay=0.004) kills 4 ms after the start of that push."""

    step: int  # completed steps at the time of the kill
    phase: str
    delay: float  # seconds


@dataclass(slots=True)
class Run:
    """One run and its problems."""

    name: str
    ranks: int
    status: int | None = None  # exit status; None: past its time limit
    seconds: float = 0.0
    restarts: int = 0
    hits: list[str] = field(default_factory=list)  # phase of each kill
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Task:
    """Model, data, output directory and overrides of all runs."""

    model: Path
    data: Path
    out: Path
    overrides: tuple[str, ...]


def main() -> int:
    """0 if every run passes its checks, else 1."""
    options = _parser().parse_args()
    os.chdir(ROOT)  # the config's paths are relative to the repository
    with TemporaryDirectory(prefix="oblr-soak-") as scratch:
        out = options.out or Path(scratch)
        model = options.model or prepare(Path(scratch))
        task = Task(model, options.data or model.parent, out, tuple(options.overrides))
        runs = soak(task, options.ranks, options.kills, options.seed, limit=not options.no_limit_run)
    print(table(runs), flush=True)
    if options.json is not None:
        write_json(options.json, runs, hits_of(runs))
    missed = set(PHASES) - set(hits_of(runs)) if options.kills >= len(PHASES) else set()
    for phase in sorted(missed):
        print(f"error: no kill happened in phase {phase}", file=sys.stderr)
    problems = [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems or missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = kills_parser(__doc__ or "", kills=30, ranks=[2, 1])
    parser.add_argument("--no-limit-run", action="store_true", help="skip the runs that allow no restart")
    return parser


def kills_parser(description: str, *, kills: int, ranks: list[int]) -> argparse.ArgumentParser:
    """The options of a tool that kills runs."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--kills", type=int, default=kills, help="total over all runs")
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks, help="numbers of trainer ranks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--model", type=_absolute, help="Hugging Face directory from examples/tiny_cpu/prepare.py")
    parser.add_argument("--data", type=_absolute, help="directory of train.jsonl (default: the model's parent)")
    parser.add_argument("--out", type=_absolute, help="keep the runs' directories here")
    parser.add_argument("--json", type=_absolute, help="write the results here")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the runs' config")
    return parser


def _absolute(path: str) -> Path:
    """An option's path, which is relative to the directory of the caller."""
    return Path(path).absolute()


def prepare(out: Path) -> Path:
    """Make the demo's data and a briefly warm-started model; returns the model's directory."""
    command = [sys.executable, "examples/tiny_cpu/prepare.py", "--out", str(out), "--steps", "60"]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    return out / "model"


def soak(task: Task, ranks: Sequence[int], kills: int, seed: int, *, limit: bool) -> list[Run]:
    """Do all runs, in order. The kills are divided over the numbers of ranks."""
    runs = []
    for position, count in enumerate(ranks):
        share = kills * (position + 1) // len(ranks) - kills * position // len(ranks)
        most = min(share, KILLS_A_RUN)
        steps = FIRST_STEP + 3 * most + 3  # spare steps for missed moments and for the final check
        unbroken = start(task, f"{count} ranks, unbroken", count, steps, [])
        runs.append(unbroken)
        expected = metrics_of(task.out, unbroken.name)
        draw = random.Random(f"{seed}/{count}")
        for number, first in enumerate(range(0, share, KILLS_A_RUN)):
            plan = plan_kills(min(KILLS_A_RUN, share - first), expected, draw, offset=first + position)
            run = start(task, f"{count} ranks, killed {number + 1}", count, steps, plan)
            check_metrics(run, metrics_of(task.out, run.name), expected, len(plan))
            runs.append(run)
        if limit:
            plan = plan_kills(1, expected, draw, offset=position)
            run = start(task, f"{count} ranks, no restart", count, steps, plan, *NO_RESTART)
            check_ending(run, task.out)
            runs.append(run)
    return runs


def plan_kills(count: int, expected: list[dict[str, Any]], draw: random.Random, offset: int) -> list[Kill]:
    """One kill per step, phases in turn, each after a random delay within the phase's usual length."""
    usual = TYPICAL_S | {
        phase: min(record[f"timing_s/{phase}"] for record in expected if f"timing_s/{phase}" in record)
        for phase in (ROLLOUT, PUSH)
        if expected
    }
    phases = [PHASES[(offset + number) % len(PHASES)] for number in range(count)]
    return [
        Kill(FIRST_STEP + number, phase, draw.uniform(0.0, 0.8 * usual[phase])) for number, phase in enumerate(phases)
    ]


def start(task: Task, name: str, ranks: int, steps: int, plan: Sequence[Kill], *overrides: str) -> Run:
    """Do one training run, kill its engine as planned, and check that nothing is left behind."""
    run, run_dir = Run(name, ranks), directory(task.out, name)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    phase_file = run_dir.with_suffix(".phase")
    phase_file.write_text(" " * 64)
    before, begin = shared_memory_names(), time.monotonic()
    limit = begin + 240 + 90 * len(plan)
    with run_dir.with_suffix(".log").open("wb") as log:
        job = subprocess.Popen(
            command_line(task, run_dir, ranks, steps, overrides),
            env=environment() | {"SOAK_PHASE": str(phase_file)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    family = Family(psutil.Process(job.pid))
    watch(job, family, phase_file, list(plan), run, limit)
    run.status, run.seconds = job.poll(), time.monotonic() - begin
    if run.status is None:
        run.problems.append(f"did not end within {limit - begin:.0f} s")
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    run.problems += [f"left over: process {process.pid}" for process in family.left_over()]
    run.problems += [f"left over: /dev/shm/{name}" for name in leaked(shared_memory_names() - before)]
    for process in family.left_over():
        process.kill()
    return run


def watch(
    job: subprocess.Popen[bytes], family: Family, phase_file: Path, plan: list[Kill], run: Run, limit: float
) -> None:
    """Follow the run's phases and kill as planned; compare its resources before the first and after the last kill."""
    first: Holdings | None = None
    last: Holdings | None = None
    looked_at, before, settled = -1, "", True
    victims: list[psutil.Process] = []
    while job.poll() is None and time.monotonic() < limit:
        phase, step = read_phase(phase_file)
        settled = settled or (before == ROLLOUT and phase != ROLLOUT)  # the killed engine has been replaced
        before = phase
        if phase == ROLLOUT and step != looked_at and step >= FIRST_STEP:
            looked_at = step
            family.look()
            victims = family.engines()  # looked up here, since the lookup takes longer than a push of a tiny model
            last = family.holdings() if settled else last
            first = first or last
        if plan and step >= plan[0].step and _kind(phase) == plan[0].phase and victims:
            time.sleep(plan[0].delay)
            before, step = read_phase(phase_file)
            if _kind(before) == plan[0].phase:
                victims.pop().kill()
                settled = False
                run.hits.append(plan.pop(0).phase)
            else:  # the phase was shorter than usual: try again in the next step
                plan[0] = Kill(step + 1, plan[0].phase, plan[0].delay / 2)
        time.sleep(POLL_S)
    if first is not None and last is not None:
        for name, was, now in zip(asdict(first), asdict(first).values(), asdict(last).values(), strict=True):
            if now > was:
                run.problems.append(f"the trainer holds {now} {name} at the end, {was} before the first kill")
    if plan:
        run.problems.append(f"{len(plan)} planned kills did not happen")


def check_metrics(run: Run, found: list[dict[str, Any]], expected: list[dict[str, Any]], kills: int) -> None:
    """Check that a run with kills ended with status 0 and with the unbroken run's metrics."""
    if run.status != 0:
        run.problems.append(f"ended with status {run.status}")
    run.restarts = sum(int(record.get("rollout/restarts", 0)) for record in found)
    if run.restarts != kills:
        run.problems.append(f"{run.restarts} restarts after {kills} kills")
    if [certain(record) for record in found] != [certain(record) for record in expected]:
        run.problems.append("its metrics differ from the unbroken run's")


def check_ending(run: Run, out: Path) -> None:
    """Check that a run without restarts saved its state, named the cause in one line, and ended with status 1."""
    if run.status != 1:
        run.problems.append(f"ended with status {run.status}, not 1")
    log = directory(out, run.name).with_suffix(".log").read_text(encoding="utf-8", errors="replace")
    lines = [line for line in log.splitlines() if line.startswith("error: rank")]
    if not lines or not all("was ended by SIGKILL while rank 0 waited for" in line for line in lines):
        run.problems.append(f"does not name the cause: {lines or log[-300:]}")
    if not checkpoints_of(directory(out, run.name)):
        run.problems.append("did not save its state")


def command_line(task: Task, run_dir: Path, ranks: int, steps: int, overrides: Sequence[str]) -> list[str]:
    """The command of a run."""
    given = settings(task, run_dir, steps, checkpoint__export_hf="false", checkpoint__every_steps=0)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    script = ["tools/soak_rank.py", "examples/tiny_cpu/config.toml"]
    return [sys.executable, *launcher, *script, *given, *task.overrides, *overrides]


def settings(task: Task, run_dir: Path, steps: int, **more: object) -> list[str]:
    """Overrides of the demo's config; keys of `more` have "__" for the dot."""
    values: dict[str, object] = {
        "run_dir": run_dir,
        "model.path": task.model,
        "data.train": task.data / "train.jsonl",
        "num_steps": steps,
        "evaluate.every_steps": 0,
        "evaluate.data": "{}",
        "gradnorm.mode": "bookkeep",  # mode "auto" would depend on the free memory
        "log.trackers": "[]",
        **{f"rollout.{name}": value for name, value in DEADLINES.items()},
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return [f"{key}={value}" for key, value in values.items()]


def environment() -> dict[str, str]:
    """The environment without the variables of a surrounding torchrun."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "MASTER_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        ours.pop(name, None)
    return ours | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def read_phase(path: Path) -> tuple[str, int]:
    """(phase, completed steps) of a run; ("", -1) before its first phase."""
    phase, _, step = path.read_text(encoding="utf-8").strip().partition(" ")
    return phase, int(step or -1)


def _kind(phase: str) -> str:
    return phase if phase in (ROLLOUT, PUSH) else IDLE


def directory(out: Path, name: str) -> Path:
    """The directory of a run."""
    return out / name.replace(", ", "-").replace(" ", "_")


def metrics_of(out: Path, name: str) -> list[dict[str, Any]]:
    """The logged steps of a run."""
    path = directory(out, name) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def certain(record: dict[str, Any]) -> dict[str, Any]:
    """A step's metrics, except those that may differ."""
    return {name: value for name, value in record.items() if not name.startswith(DOUBTFUL)}


def hits_of(runs: Sequence[Run]) -> Counter[str]:
    """Number of kills per phase."""
    return Counter(phase for run in runs for phase in run.hits)


def table(runs: Sequence[Run]) -> str:
    """One line per run, then the number of kills per phase."""
    lines = [f"{'run':24} {'status':>6} {'seconds':>8} {'restarts':>8}  killed in"]
    for run in runs:
        fault = "" if not run.problems else f"  WRONG: {'; '.join(run.problems)}"
        lines.append(
            f"{run.name:24} {run.status!s:>6} {run.seconds:8.0f} {run.restarts:8}  {', '.join(run.hits)}{fault}"
        )
    hits = hits_of(runs)
    lines.append(f"{sum(hits.values())} kills: " + ", ".join(f"{hits[phase]} in {phase}" for phase in PHASES))
    return "\n".join(lines)


def write_json(path: Path, rows: Sequence[Any], kills: Mapping[str, int]) -> None:
    """Write {"machine":, "date":, "rows": [one per run], "kills": {moment: count}}; rows are dataclasses."""
    record = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).date().isoformat(),
        "rows": [asdict(row) for row in rows],
        "kills": dict(kills),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
