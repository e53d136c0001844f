"""Outcomes of lines as JSON, which later calls add to, and as Markdown for docs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from oblr_megatron.errors import UserError
from tools.gpu_test.line import Line

VERSION = 1
REHEARSED = "rehearsed"  # ended by itself on a CPU; nothing was judged
BAD = ("failed", "not met")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Example: Outcome("4b", "cuDNN plans", ["ms ... <= 5"], "ok", "", {"ms ...": 0.3}, 81.0, "2026-11-23", "...")"""

    name: str
    title: str
    expected: list[str]
    verdict: str  # "ok", "not met", "failed", "lacks", "rehearsed"
    why: str
    figures: dict[str, float | str]
    seconds: float
    date: str
    machine: str  # GPU, driver, versions

    @classmethod
    def of(cls, line: Line, verdict: str, why: str, *, date: str, machine: str) -> Outcome:
        """Of a line that was not run."""
        return cls(line.name, line.title, list(map(str, line.bounds)), verdict, why, {}, 0.0, date, machine)


def load(path: Path) -> dict[str, Outcome]:
    """The outcomes of earlier calls by line; none if there is no file.

    Raises:
        UserError: the file is not one of ours.
    """
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["version"] == VERSION
        return {name: Outcome(**fields) for name, fields in record["lines"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        fix = "remove it, or give another directory"
        raise UserError(f"not a file of results ({type(error).__name__})", where=str(path), fix=fix) from error


def write(directory: Path, outcomes: Mapping[str, Outcome], lines: Mapping[str, Line]) -> None:
    """Write gpu.json and gpu.md, each at once; lines in the order of the table."""
    ordered = {name: outcomes[name] for name in lines if name in outcomes}
    record = {"version": VERSION, "lines": {name: asdict(outcome) for name, outcome in ordered.items()}}
    for name, text in (
        ("gpu.json", json.dumps(record, indent=2, allow_nan=False) + "\n"),
        ("gpu.md", markdown(list(ordered.values()), lines)),
    ):
        partial = directory / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, directory / name)


def markdown(outcomes: Sequence[Outcome], lines: Mapping[str, Line]) -> str:
    """Three parts: machines and dates, a row for each line, all figures."""
    text = ["`make gpu-test`. Machines:", ""]
    for machine, date in dict.fromkeys((outcome.machine, outcome.date) for outcome in outcomes):
        names = ", ".join(one.name for one in outcomes if (one.machine, one.date) == (machine, date))
        text.append(f"- {date}, lines {names}: {machine}")
    rows = [(one.name, one.title, "; ".join(one.expected), seen(one, lines), verdict_of(one)) for one in outcomes]
    text += ["", *_table(("line", "what", "expected", "seen", "verdict"), rows)]
    figures = [(one.name, name, _number(value)) for one in outcomes for name, value in one.figures.items()]
    if figures:
        text += ["", "All figures:", "", *_table(("line", "figure", "value"), figures)]
    return "\n".join(text) + "\n"


def seen(outcome: Outcome, lines: Mapping[str, Line]) -> str:
    """The range of the figures of each bound, in the order of the bounds."""
    ranges = []
    for bound in lines[outcome.name].bounds if outcome.name in lines else ():
        found = sorted(bound.found(outcome.figures).values())
        if found:
            ranges.append(" to ".join(_number(value) for value in dict.fromkeys((found[0], found[-1]))))
    return "; ".join(ranges)


def verdict_of(outcome: Outcome) -> str:
    """Verdict and reason in one text."""
    return f"{outcome.verdict}: {outcome.why}" if outcome.why else outcome.verdict


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells)]
