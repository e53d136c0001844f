"""Measure a whole step (sampling, reward, gradient, update) of the full stack against TRL's trainers.

    python tools/bench/step.py --json run/bench/step.json
    python tools/bench/step.py --shape long --json run/bench/step_long.json
    python tools/bench/step.py --quick                        checks that it works; the times mean nothing

Models and tasks: step_shapes.py. fp32, equal threads for all:

- oblr_pooled: megatron-core and vLLM, one rank; the default recipe with exact norms, a push of weights per step
- rloo: the same stack with RLOO's baseline and no norms, the estimator of TRL's RLOO; two folds instead of four,
  because TRL does not estimate the noise
- oblr_pooled_stream, rloo_stream: the same with rollout.overlap = "stream"; trainer and engine share the threads
- oblr_pooled_ranks, rloo_ranks: the same with one rank for each thread, each with an engine of its own
- trl_grpo, trl_rloo: TRL's trainers with transformers' `generate` (TRL 1.16 takes vLLM up to 0.31, the package needs
  0.32), default losses, the batch in one pass; a fold of the package is one pass, too
- trl_grpo_ranks, trl_rloo_ranks: the same with one process for each thread, which share the batch

Each system is a process, and all stay alive. In a round each takes `--steps` steps without a pause, as in training. The
first of several is not counted: it finds the data of the other systems in the processor's caches. The time of a round
is the median of its counted steps. Two warm-up rounds are not counted. `ratio_to_trl` is the median over rounds of
(system's time / faster TRL trainer's time) in one round. The learning rate is close to 0, so that all systems always
sample from the same policy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from record import publish
from rounds import paired_ratio
from step_shapes import SHAPES, make_inputs
from step_system import PRESETS, RANKS, STREAM, TRL, Work

SYSTEMS = (*PRESETS, *TRL)
WARM_UP = 2  # uncounted rounds


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one system.

    Example: Row(system="oblr_pooled", samples=512, rounds=10, steps=5, seconds=0.9, fastest=0.85, slowest=1.1,
                 ratio_to_trl=0.6)
    """

    system: str
    samples: int  # per step
    rounds: int
    steps: int  # in a round; the first of several is not counted
    seconds: float  # per step, median
    fastest: float
    slowest: float
    ratio_to_trl: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    options = parse_options(arguments)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work = prepare(directory, options)
        systems = {name: System(name, work, directory, stack) for name in options.systems}
        times = measure(systems, options.rounds, options.steps)
    publish(rows_of(times, work, options.steps), "step", options.json)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. --quick changes the defaults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="must include at least one of TRL's")
    parser.add_argument("--shape", choices=("demo", "long"), default="demo", help="of the step (default: %(default)s)")
    parser.add_argument("--prompts", type=int, help="prompts per step (default: the shape's)")
    parser.add_argument("--group", type=int, help="responses per prompt (default: the shape's)")
    parser.add_argument("--rounds", type=int, help="measured rounds (default: 20)")
    parser.add_argument("--steps", type=int, help="of a system in a round (default: the shape's)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads per process")
    parser.add_argument("--quick", action="store_true", help="8 prompts, one round, three systems, a short warm start")
    options = parser.parse_args(arguments)
    prompts, group, steps = SHAPES[options.shape]
    options.prompts = options.prompts or (8 if options.quick else prompts)
    options.group = options.group or group
    options.steps = options.steps or (1 if options.quick else steps)
    options.rounds = options.rounds or (1 if options.quick else 20)
    options.systems = options.systems or [
        name for name in SYSTEMS if name in ("oblr_pooled", "trl_grpo", "trl_rloo") or not options.quick
    ]
    if not set(options.systems) & set(TRL):
        parser.error(f"--systems: include one of {', '.join(TRL)}; the others are compared with it")
    return options


def prepare(directory: Path, options: argparse.Namespace) -> Work:
    """Make the shape's data and model."""
    make_inputs(options.shape, directory, quick=options.quick)
    work = Work(
        shape=options.shape,
        directory=str(directory),
        num_prompts=options.prompts,
        group_size=options.group,
        num_steps=(WARM_UP + options.rounds) * options.steps + 1,  # a step's time is reported when the next one begins
        num_threads=options.threads,
    )
    (directory / "work.json").write_text(json.dumps(asdict(work)), encoding="utf-8")
    return work


class System:
    """The process of one system. A call takes steps and returns the median seconds of the counted ones."""

    def __init__(self, name: str, work: Work, directory: Path, stack: ExitStack) -> None:
        self._log = directory / f"{name}.log"
        threads, launcher = work.num_threads, [sys.executable]
        if name.endswith(STREAM):
            threads = max(1, threads // 2)
        if name.endswith(RANKS):
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(threads)]
            threads = 1
        script = str(Path(__file__).with_name("step_system.py"))
        self._process = subprocess.Popen(
            [*launcher, script, str(directory / "work.json"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context(self._log.open("w")),
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(sys.path[:1])},
            text=True,
        )
        stack.callback(self._end)
        self._answer()

    def __call__(self, steps: int) -> float:
        """Take the steps without a pause. The first of several is not counted."""
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.write("step\n" * steps)
        self._process.stdin.flush()
        taken = [float(self._answer()) for _ in range(steps)]
        return statistics.median(taken[1:] or taken)

    def _answer(self) -> str:
        assert self._process.stdout is not None, "opened as a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the system has died:\n{self._log.read_text(encoding='utf-8')[-4000:]}")
        return line

    def _end(self) -> None:
        """Close the process's standard input, which ends it and its engine."""
        try:
            self._process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(systems: dict[str, System], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step, for every counted round. The order of the systems alternates."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(WARM_UP + rounds):
        for name in list(systems)[:: -1 if number % 2 else 1]:
            seconds = systems[name](steps)
            if number >= WARM_UP:
                times[name].append(seconds)
    return times


def rows_of(times: dict[str, list[float]], work: Work, steps: int) -> list[Row]:
    """One row per system."""
    trl = [min(taken) for taken in zip(*(times[name] for name in times if name in TRL), strict=True)]
    return [
        Row(
            system=name,
            samples=work.num_prompts * work.group_size,
            rounds=len(taken),
            steps=steps,
            seconds=statistics.median(taken),
            fastest=min(taken),
            slowest=max(taken),
            ratio_to_trl=paired_ratio(taken, trl),
        )
        for name, taken in times.items()
    ]


if __name__ == "__main__":
    main()
