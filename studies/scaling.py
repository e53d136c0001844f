"""`oblr-megatron study scaling`: the planner's time and memory against measured megatron-core steps on this machine.

    oblr-megatron study scaling --out run/study/scaling         twelve minutes on two otherwise idle cores

The cases (`scaling_cases.py`) are layouts of one small model on 1, 2 and 4 ranks, and model sizes at one layout. Each
takes steps with the trainer's own gradient and optimizer over gloo. Rounds run the cases in alternating order; the
difference between two rounds is the noise of a time. For every row, constants fitted to all other rows predict it; the
ranking uses these predictions. Each phase's time is its fastest, since other load only makes it slower.

Writes DIR/scaling.{json,md,svg,png}. DIR/constants.json holds the constants fitted to all rows (`plan --calibration`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import log
from pathlib import Path
from typing import Any

from oblr_megatron.errors import EXIT_OK, RunError, UserError
from oblr_megatron.extras.planner.calibration import (
    CPU_TRAINING,
    Fitted,
    Observation,
    fit,
    predicted_phases,
    root_mean_square,
    write_constants,
)
from oblr_megatron.extras.planner.constants import PlannerMachine, cpu_machine
from oblr_megatron.extras.planner.setting import Setting
from oblr_megatron.runtime.command_line import count
from studies.jobs import child_environment
from studies.scaling_cases import CASES, Case, case_named

PHASES = ("gradient", "optimizer")  # "gradient" includes norms
LEAST_NOISE = 0.02  # smallest assumed noise of a log time ratio: two rounds may agree by chance
DEADLINE_S = 900.0  # of one round on one number of ranks, seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One case. Example: Row("tp2", 2, {"gradient": 0.9, "optimizer": 0.01}, {...}, {...}, 0.02, 82e6, 83e6)."""

    name: str
    ranks: int
    measured: dict[str, float]  # the fastest time of each phase, seconds
    predicted: dict[str, float]  # with constants fitted to the other rows
    fitted: dict[str, float]  # with constants fitted to all rows
    noise: float  # |log ratio| of the fastest steps of two rounds
    memory: int  # peak bytes of live tensors on the fullest rank
    estimated: int  # the planner's estimate of `memory`

    @property
    def seconds(self) -> float:
        """Measured time of the whole step."""
        return sum(self.measured.values())

    @property
    def ratio(self) -> float:
        """Predicted over measured time of the whole step."""
        return sum(self.predicted.values()) / self.seconds

    @property
    def memory_ratio(self) -> float:
        """Estimated over measured memory."""
        return self.estimated / self.memory


@dataclass(frozen=True, slots=True)
class Ranking:
    """How well predicted times order the measured ones.

    Example: Ranking(spearman=0.97, noise=0.03, layouts=21, pairs=190, right=184, distinct=9)
    """

    spearman: float
    noise: float  # root mean square of the rows' noise
    layouts: int
    pairs: int  # pairs with measured times that differ by more than twice the noise
    right: int  # such pairs that are predicted in the measured order
    distinct: int  # longest chain of layouts, each slower than the previous by more than twice the noise

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Ranking:
        """Rank two or more rows."""
        from scipy.stats import spearmanr

        measured, predicted = [row.seconds for row in rows], [sum(row.predicted.values()) for row in rows]
        noise = max(LEAST_NOISE, root_mean_square([row.noise for row in rows]))
        apart = [
            (first, second)
            for first, second in combinations(range(len(rows)), 2)
            if abs(log(measured[first] / measured[second])) > 2 * noise
        ]
        right = sum((measured[i] < measured[j]) == (predicted[i] < predicted[j]) for i, j in apart)
        correlation = float(spearmanr(measured, predicted).statistic)
        return cls(correlation, noise, len(rows), len(apart), right, len(chain(measured, 2 * noise)))


def chain(seconds: Sequence[float], gap: float) -> list[float]:
    """Ascending times, starting with the smallest; each exceeds the previous by more than `gap` in log."""
    found: list[float] = []
    for value in sorted(seconds):
        if not found or log(value / found[-1]) > gap:
            found.append(value)
    return found


def measure(
    cases: Sequence[Case], out: Path, *, rounds: int, steps: int, advance: Callable[[int], None]
) -> dict[str, list[dict[str, Any]]]:
    """Case name -> the records of all rounds."""
    found: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    for number in range(rounds):
        for ranks, group in by_ranks(cases):
            ordered = group[:: -1 if number % 2 else 1]
            for record in on_ranks(ranks, ordered, out / "ranks.json", steps=steps, memory=number == 0):
                found[record["name"]].append(record)
            advance(len(group))
    return found


def by_ranks(cases: Sequence[Case]) -> Iterator[tuple[int, list[Case]]]:
    """Group the cases by number of ranks."""
    for ranks in sorted({case.ranks for case in cases}):
        yield ranks, [case for case in cases if case.ranks == ranks]


def on_ranks(ranks: int, cases: Sequence[Case], file: Path, *, steps: int, memory: bool) -> list[dict[str, Any]]:
    """Start the ranks, which measure the cases one after another; returns one record per case.

    Raises:
        RunError: the ranks failed or passed their deadline.
    """
    launcher = ["-m", "oblr_megatron.runtime.launch", "--standalone", "--nproc-per-node", str(ranks)]
    script = ["-m", "studies.scaling_rank", str(file), *(case.name for case in cases)]
    options = ["--steps", str(steps), *(["--memory"] if memory else [])]
    environment = child_environment() | {"GLOO_SOCKET_IFNAME": "lo"}
    log_file = file.with_suffix(".log")
    with log_file.open("w", encoding="utf-8") as output:
        try:
            subprocess.run(
                [sys.executable, *launcher, *script, *options],
                check=True,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=DEADLINE_S,
            )
        except subprocess.SubprocessError as error:
            raise RunError(f"measuring on {ranks} ranks failed ({error}); see {log_file}") from error
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def rows_of(records: dict[str, list[dict[str, Any]]], machine: PlannerMachine) -> tuple[list[Row], Fitted]:
    """One row per case, each predicted with constants fitted to the others; and the fit to all."""
    observations = [observation(name, found, machine) for name, found in records.items()]
    every = fit(observations, machine.constants, CPU_TRAINING)
    rows = []
    for position, held_out in enumerate(observations):
        others = [*observations[:position], *observations[position + 1 :]]
        constants = fit(others, every.constants, CPU_TRAINING).constants
        case, found = case_named(held_out.name), records[held_out.name]
        rows.append(
            Row(
                name=held_out.name,
                ranks=case.ranks,
                measured=dict(held_out.seconds),
                predicted=predicted_phases(held_out, constants),
                fitted=predicted_phases(held_out, every.constants),
                noise=noise_of(found),
                memory=found[0]["memory"],
                estimated=case.estimated_bytes(),
            )
        )
    return rows, every


def observation(name: str, found: Sequence[dict[str, Any]], machine: PlannerMachine) -> Observation:
    """The fastest time of each phase over all rounds."""
    case = case_named(name)
    seconds = {phase: min(value for one in found for value in one[phase]) for phase in PHASES}
    return Observation(name, Setting(case.hf_config(), case.config(), case.ranks, machine), seconds)


def noise_of(found: Sequence[dict[str, Any]]) -> float:
    """Largest |log ratio| between the fastest steps of two rounds; 0 with one round."""
    fastest = [min(sum(phases) for phases in zip(*(one[name] for name in PHASES), strict=True)) for one in found]
    return log(max(fastest) / min(fastest))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `study scaling`."""
    parser.add_argument("--out", type=Path, required=True, help="directory for table, chart and constants")
    names = [case.name for case in CASES]
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=names,
        default=names,
        metavar="CASE",
        help="cases to measure; earlier results of others are kept",
    )
    parser.add_argument("--steps", type=count, default=6, help="timed steps per case and round (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=2, help="rounds over all cases (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure nothing: fit DIR/measured.json again")
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """Measure, fit, write DIR/scaling.{json,md,svg,png} and DIR/constants.json."""
    from oblr_megatron.checks.packages import require_for_studies
    from oblr_megatron.observe.console import progress
    from studies.scaling_report import write
    from studies.summary import environment

    require_for_studies("matplotlib", "scipy")
    measured = options.out / "measured.json"
    if options.again and not measured.exists():
        raise UserError("nothing was measured here", where=str(options.out), fix="leave out --again")
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.again:
        cases = [case_named(name) for name in options.cases]
        if len(cases) < 2 and not measured.exists():
            raise UserError("one case is predicted from no other", where="--cases", fix="name two cases or more")
        with progress("scaling", len(cases) * options.rounds) as advance:
            records = measure(cases, options.out, rounds=options.rounds, steps=options.steps, advance=advance)
        kept = json.loads(measured.read_text(encoding="utf-8")) if measured.exists() else {}
        records = {case.name: (kept | records)[case.name] for case in CASES if case.name in kept | records}
        measured.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    rows, every = rows_of(json.loads(measured.read_text(encoding="utf-8")), cpu_machine())
    ranking = Ranking.of(rows)
    write_constants(every, options.out / "constants.json", ["study scaling"])
    record = environment() | {"ranking": asdict(ranking), "rows": [asdict(row) for row in rows]}
    (options.out / "scaling.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(write(rows, ranking, every, options.out))
    return EXIT_OK
