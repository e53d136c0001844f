"""Lines of a JSONL file -> rows with a question and an answer; what cannot be used is left out and remembered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from oblr_megatron.config import DataConfig


class Skipped(NamedTuple):
    """A row that was left out. Example: Skipped(line=12, reason="not a JSON object")."""

    line: int  # in the file, counted from 1 as editors do
    reason: str


class Row(NamedTuple):
    """A usable row.

    Example: Row(row=41, id="gsm8k-train-41", question="2+3?", answer="5", source="gsm8k")
    """

    row: int  # line in the file, counted from 0
    id: str  # the row's own "id", else file name and line
    question: str
    answer: str
    source: str  # the row's own "source", else the file name


def read_rows(path: Path, config: DataConfig, skipped: list[Skipped], *, training: bool) -> Iterator[Row]:
    """The usable rows in file order; blank lines are passed over.

    Args:
        path: JSONL file, UTF-8.
        config: names of the columns.
        skipped: receives the rows left out.
        training: leave out rows flagged `overlaps_benchmark`.

    Raises:
        UserError: the file cannot be read.
    """
    for number, line in _lines(path):
        if not line.strip():
            continue
        record = _parse(line)
        reason = record if isinstance(record, str) else _unusable(record, config, training)
        if isinstance(record, str) or reason:
            skipped.append(Skipped(number + 1, reason))
            continue
        yield Row(
            row=number,
            id=_text(record.get("id")) or f"{path.stem}-{number}",
            question=_text(record[config.question_column]),
            answer=_text(record[config.answer_column]).strip(),
            source=_text(record.get("source")) or path.stem,
        )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(position from 0, bytes) of each line; a byte-order mark is dropped."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
    except OSError as error:
        raise UserError(
            f"cannot read the data set: {error.strerror}", where=str(path), mend="give an existing JSONL file"
        ) from error


def _parse(line: bytes) -> dict[str, Any] | str:
    """The row, or why it cannot be read."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError):  # deep nesting ends in a RecursionError
        return "not JSON"
    return record if isinstance(record, dict) else "not a JSON object"


def _unusable(record: dict[str, Any], config: DataConfig, training: bool) -> str:
    """Why a row is left out; empty if it is not."""
    for column in (config.question_column, config.answer_column):
        if not _text(record.get(column)).strip():
            return f"no {column!r}"
    if training and record.get("overlaps_benchmark"):
        return "flagged overlaps_benchmark"
    return ""


def _text(value: Any) -> str:
    """A column's value as text: numbers are written out, anything but a string or a number counts as absent."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
