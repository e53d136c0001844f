"""A whole step (sampling, reward, gradient, update) of the package's full stack against TRL's trainers.

    python tools/bench/step.py --json run/bench/step.json
    python tools/bench/step.py --quick                        whether it works; the figures say nothing

The demo's model and task (examples/tiny_cpu), 64 prompts x 8 responses a step, fp32, the same threads for all:

- oblr_po: megatron-core and vLLM, one rank; exact norms, optimal_prior, the snr schedule; the weights pushed each step
- rloo: the same stack with RLOO's baseline and no norms, as TRL's RLOO estimates
- trl_grpo, trl_rloo: TRL's trainers with transformers' `generate`, no vLLM, their default losses, the batch in one pass

The systems are processes of their own, all alive, that make a step in turn, round after round; two rounds before the
first are not counted. `ratio_to_trl` is the median over rounds of a system's time to that of the faster trainer of TRL
in the same round. The learning rate is next to nothing, so that all sample from the same policy throughout.
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
from step_system import PRESETS, ROOT, TRL, Work

SYSTEMS = (*PRESETS, *TRL)
WARM_UP = 2  # rounds that are not counted


@dataclass(frozen=True, slots=True)
class Row:
    """One system.

    Example: Row(system="oblr_po", samples=512, rounds=10, seconds=0.9, fastest=0.85, slowest=1.1, ratio_to_trl=0.6)
    """

    system: str
    samples: int  # a step
    rounds: int
    seconds: float  # of a step, median
    fastest: float
    slowest: float
    ratio_to_trl: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the figures."""
    options = parse_options(arguments)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work = prepare(directory, options)
        systems = {name: System(name, work, directory, stack) for name in options.systems}
        times = measure(systems, options.rounds)
    publish(rows_of(times, work), "step", options.json)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; --quick fills in what is not given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="at least one of TRL's among them")
    parser.add_argument("--prompts", type=int, help="a step (64)")
    parser.add_argument("--group", type=int, default=8, help="responses a prompt")
    parser.add_argument("--rounds", type=int, help="to measure (20)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every process")
    parser.add_argument("--quick", action="store_true", help="8 prompts, one round, no rloo, hardly a warm start")
    options = parser.parse_args(arguments)
    options.prompts = options.prompts or (8 if options.quick else 64)
    options.rounds = options.rounds or (1 if options.quick else 20)
    options.systems = options.systems or [name for name in SYSTEMS if name != "rloo" or not options.quick]
    if not set(options.systems) & set(TRL):
        parser.error(f"--systems: name one of {', '.join(TRL)}, which the others are measured against")
    return options


def prepare(directory: Path, options: argparse.Namespace) -> Work:
    """The demo's data and model, warm-started."""
    steps = "150" if options.quick else "900"
    command = [sys.executable, "examples/tiny_cpu/prepare.py", "--out", str(directory), "--steps", steps]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    work = Work(
        directory=str(directory),
        num_prompts=options.prompts,
        group_size=options.group,
        num_steps=WARM_UP + options.rounds + 1,  # a step's time is known when the next one begins
        num_threads=options.threads,
    )
    (directory / "work.json").write_text(json.dumps(asdict(work)), encoding="utf-8")
    return work


class System:
    """The process of one system, started and ready; call it for the seconds of a step."""

    def __init__(self, name: str, work: Work, directory: Path, stack: ExitStack) -> None:
        self._log = directory / f"{name}.log"
        script = str(Path(__file__).with_name("step_system.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, str(directory / "work.json"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context(self._log.open("w")),
            env=os.environ | {"OMP_NUM_THREADS": str(work.num_threads)},
            text=True,
        )
        stack.callback(self._end)
        self._answer()

    def __call__(self) -> float:
        """One step."""
        assert self._process.stdin is not None, "it was opened as a pipe"
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None, "it was opened as a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the system has died:\n{self._log.read_text(encoding='utf-8')[-4000:]}")
        return line

    def _end(self) -> None:
        """Its standard input ends, and so does it, with its engine."""
        try:
            self._process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(systems: dict[str, System], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step that counts; a step of each system a round, in turn forwards and backwards."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(WARM_UP + rounds):
        for name in list(systems)[:: -1 if number % 2 else 1]:
            seconds = systems[name]()
            if number >= WARM_UP:
                times[name].append(seconds)
    return times


def rows_of(times: dict[str, list[float]], work: Work) -> list[Row]:
    """One row a system."""
    trl = [min(taken) for taken in zip(*(times[name] for name in times if name in TRL), strict=True)]
    return [
        Row(
            system=name,
            samples=work.num_prompts * work.group_size,
            rounds=len(taken),
            seconds=statistics.median(taken),
            fastest=min(taken),
            slowest=max(taken),
            ratio_to_trl=paired_ratio(taken, trl),
        )
        for name, taken in times.items()
    ]


if __name__ == "__main__":
    main()
