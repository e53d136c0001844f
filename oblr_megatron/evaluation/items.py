"""Every response of an evaluation as a line of SET.jsonl: what was asked, what came, how it was judged.

A line is a response and not a prompt with all of its responses, since the greedy ones are made first: so the file only
ever grows at its end, block by block, and what a process that was killed leaves behind is cut back to whole blocks.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from oblr_megatron.errors import UserError
from oblr_megatron.evaluation.accuracy import Grade

logger = logging.getLogger(__name__)

Kind = Literal["greedy", "sampled"]
Key = tuple[str, str, int]
"""What tells the lines of a file apart: kind, id of the prompt, number of the sample."""


@dataclass(frozen=True, slots=True)
class Item:
    """One response; its fields are those of a line.

    Example: Item(set="gsm8k", id="gsm8k-test-7", row=7, prompt="Q: 2+3?\\nA:", gold="5", kind="sampled", sample=1,
                  response="It is \\boxed{5}.", answer="5", verdict=1.0, reward=1.1, tokens=9, finish_reason="stop")
    """

    set: str
    id: str
    row: int  # in the source, from 0
    prompt: str  # after the template
    gold: str
    kind: Kind
    sample: int  # 0 .. k-1; 0 of a greedy one
    response: str
    verdict: float  # of the main reward, unweighted: what accuracies count
    reward: float  # of all terms, weighted
    tokens: int  # of the response, an end-of-sequence token included
    finish_reason: str  # "stop", or "length": cut at the limit
    answer: str | None = None  # as extracted; None where none was found
    reads_answers: bool = True  # of the reward; a line of one that reads none has no "answer"

    @property
    def key(self) -> Key:
        """Which response it is."""
        return self.kind, self.id, self.sample

    @property
    def grade(self) -> Grade:
        """What the figures need."""
        return Grade(self.verdict, self.answer, self.tokens, self.finish_reason == "length", self.reads_answers)

    def line(self) -> bytes:
        """As it is written; strict JSON, also of a text with half a surrogate pair."""
        fields = asdict(self)
        if not fields.pop("reads_answers"):
            del fields["answer"]
        return json.dumps(fields, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Item:
        """The inverse of `line`; ValueError or TypeError if it is no such line."""
        fields: dict[str, Any] = json.loads(line)
        return cls(**fields, reads_answers="answer" in fields)


def items_path(directory: Path, name: str) -> Path:
    """Where a set's responses are kept; a name may hold slashes."""
    return directory / f"{name.replace('/', '__')}.jsonl"


def append(path: Path, items: Iterable[Item]) -> None:
    """Add lines; they are on the disk when this returns.

    Raises:
        OSError: they may be there in part.
    """
    with path.open("ab") as stream:
        stream.write(b"".join(item.line() for item in items))
        stream.flush()
        os.fsync(stream.fileno())


def recover(path: Path, blocks: Iterable[Sequence[Key]]) -> list[Grade]:
    """The responses of the whole blocks that a file holds, in order; what follows them is cut off the file.

    Args:
        path: may be absent, which is no block.
        blocks: what a finished file would hold.

    Raises:
        UserError: a line within these blocks is damaged or not the one expected.
    """
    grades: list[Grade] = []
    end = 0
    if not path.exists():
        return grades
    with path.open("r+b") as stream:
        for block in blocks:
            lines = [stream.readline() for _ in block]
            if not all(line.endswith(b"\n") for line in lines):
                break
            grades += [
                _grade(line, key, path, len(grades) + number)
                for number, (line, key) in enumerate(zip(lines, block, strict=True), start=1)
            ]
            end = stream.tell()
        stream.truncate(end)
    return grades


def _grade(line: bytes, key: Key, path: Path, number: int) -> Grade:
    try:
        item = Item.of_line(line)
    except (ValueError, TypeError):
        item = None
    if item is None or item.key != key:
        raise UserError(
            f"line {number} is damaged, or not of this evaluation", where=str(path), fix="begin anew with --overwrite"
        )
    return item.grade


class RunItems:
    """RUN_DIR/evaluations/step_000020/SET.jsonl of a run's own evaluations. A file that cannot be written costs the run
    nothing but the files: it is warned of once, and no more are written.

    Args:
        directory: RUN_DIR/evaluations; None writes nothing.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def sink(self, step: int, name: str) -> Callable[[Sequence[Item]], None]:
        """What takes a set's blocks in order; a file of the same step and set, of a run that went on, is replaced."""
        begun = False

        def write(items: Sequence[Item]) -> None:
            nonlocal begun
            if self._directory is None:
                return
            try:
                path = items_path(self._directory / f"step_{step:06}", name)
                path.parent.mkdir(parents=True, exist_ok=True)
                if not begun:
                    path.unlink(missing_ok=True)
                append(path, items)
                begun = True
            except OSError as error:
                logger.warning("the run goes on without saving its evaluations: %s", error)
                self._directory = None

        return write
