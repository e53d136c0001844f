"""Reads metrics.jsonl, and writes files atomically.

metrics.jsonl holds one strict JSON object per step, in rising order of `step`, the number of optimizer steps done. The
record of step 0 is the evaluation before training.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from oblr_megatron.errors import UserError
from oblr_megatron.metrics.names import Record

METRICS_FILE = "metrics.jsonl"
RANKS_FILE = "logs/ranks.jsonl"  # written by observe/performance/ranks.py
ENVIRONMENT_FILE = "environment.json"
FIX_LINE = "remove the line or restore the file"

logger = logging.getLogger(__name__)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old content or the new."""
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read_metrics(run_dir: Path) -> list[Record]:
    """All records of a run, finished or not.

    An incomplete last line is dropped with a warning.

    Raises:
        UserError: there is no metrics.jsonl, or a line is not a record.
    """
    path = Path(run_dir) / METRICS_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("the metrics file does not exist", where=str(path), fix="give the run_dir of a run") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the metrics: {error}", where=str(path), fix="give a readable file") from error
    *lines, rest = text.split("\n")
    records = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    return records + _parse_unfinished(rest, path)


def _parse(line: str, where: str) -> Record:
    """One line as strict JSON; NaN and Infinity, which Python accepts, are refused."""
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise UserError(f"the line is not JSON: {error}", where=where, fix=FIX_LINE) from None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise UserError('the line is not an object with an integer "step"', where=where, fix=FIX_LINE)
    return record


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _parse_unfinished(rest: str, path: Path) -> list[Record]:
    """The text after the last newline: nothing, a complete record, or a line cut by a kill."""
    if not rest:
        return []
    try:
        return [_parse(rest, str(path))]
    except UserError:
        logger.warning("%s: dropped the incomplete last line", path)
        return []
