"""SET.jsonl: one line for every response of an evaluation, with its prompt and score.

Lines are appended block by block.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from oblr_megatron.evaluation.accuracy import Grade

logger = logging.getLogger(__name__)

Kind = Literal["greedy", "sampled"]
Sink = Callable[[int, Sequence["Item"]], None]
"""Takes the position of a block's first response in the set, and the block's items."""
COLUMNS = ("id", "kind", "prompt", "response", "gold", "answer", "verdict", "tokens")
"""Columns of the table that trackers get."""
ROWS = 100  # in that table
LONGEST_TEXT = 2000  # characters in it


@dataclass(frozen=True, slots=True)
class Item:
    """One response; the fields are those of a line.

    Example: Item(set="gsm8k", id="gsm8k-test-7", row=7, prompt="Q: 2+3?\\nA:", gold="5", kind="sampled", sample=1,
                  response="It is \\boxed{5}.", answer="5", verdict=1.0, reward=1.1, tokens=9, finish_reason="stop")
    """

    set: str
    id: str
    row: int  # in the source, from 0
    prompt: str  # after the template
    gold: str
    kind: Kind
    sample: int  # 0 .. k-1; 0 for greedy responses
    response: str
    verdict: float  # score by the main reward, unweighted; accuracies are computed from it
    reward: float  # weighted sum of all terms
    tokens: int  # of the response, including an end-of-sequence token
    finish_reason: str  # "stop", or "length" if truncated
    answer: str | None = None  # as extracted; None if not found
    reads_answers: bool = True  # whether the reward extracts answers; if not, the line has no "answer"
    scored: bool = True  # False: the main reward failed or was late; only then the line has "scored"
    by_value: bool = False  # whether votes compare the answer as mathematics; not in the line

    @property
    def row_of_table(self) -> tuple[Any, ...]:
        """The values of COLUMNS, long texts cut."""
        values = (getattr(self, column) for column in COLUMNS)
        return tuple(value[:LONGEST_TEXT] if isinstance(value, str) else value for value in values)

    @property
    def grade(self) -> Grade:
        """The fields that metrics need."""
        truncated = self.finish_reason == "length"
        return Grade(self.verdict, self.answer, self.tokens, truncated, self.reads_answers, self.scored, self.by_value)

    def line(self) -> bytes:
        """The line in the file: strict JSON, even if a text contains half of a surrogate pair."""
        fields = asdict(self)
        del fields["by_value"]
        if not fields.pop("reads_answers"):
            del fields["answer"]
        if self.scored:
            del fields["scored"]
        return json.dumps(fields, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def items_path(directory: Path, name: str) -> Path:
    """The file of a set; slashes in its name are replaced."""
    return directory / f"{name.replace('/', '__')}.jsonl"


def append(path: Path, items: Iterable[Item]) -> None:
    """Append lines and flush them to the disk.

    Raises:
        OSError: the lines may be written in part.
    """
    with path.open("ab") as stream:
        stream.write(b"".join(item.line() for item in items))
        stream.flush()
        os.fsync(stream.fileno())


class RunItems:
    """Saves a run's evaluations as RUN_DIR/evaluations/step_000020/SET.jsonl, and keeps the first rows of the latest.

    After a write error it logs one warning and saves nothing more; the run continues.

    Args:
        directory: RUN_DIR/evaluations; None: save nothing.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self.rows: list[tuple[Any, ...]] = []  # the latest sink's first responses: COLUMNS

    def sink(self, step: int, name: str) -> Sink:
        """The sink for a set's blocks. The file of the same step and set, left by an earlier attempt, is replaced."""
        self.rows = []

        def write(first: int, items: Sequence[Item]) -> None:
            self.rows += [item.row_of_table for item in items[: ROWS - len(self.rows)]]
            if self._directory is None:
                return
            try:
                path = items_path(self._directory / f"step_{step:06}", name)
                path.parent.mkdir(parents=True, exist_ok=True)
                if first == 0:
                    path.unlink(missing_ok=True)
                append(path, items)
            except OSError as error:
                logger.warning("evaluations are not saved any more, the run continues: %s", error)
                self._directory = None

        return write
