"""JSONL rows -> prompts: template, length filter, a shuffle per epoch, and an exact position to resume from.

Every row is read and tokenised once, when the set is opened: the length filter has to see each row anyway, and only then
can an unusable set be refused before anything is started. What is kept of a row is its text, its answer and its token ids
(32-bit integers in one flat array): 17,000 rows of competition mathematics take about 20 MB.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from oblr_megatron.errors import UserError
from oblr_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config import DataConfig

logger = logging.getLogger(__name__)

TOKENIZE_ROWS = 1024  # rows handed to the tokenizer at once
NAMED_ROWS = 5  # skipped rows that the warning names


class Skipped(NamedTuple):
    """A row that was left out. Example: Skipped(line=12, reason="not a JSON object")."""

    line: int  # in the file, counted from 1 as editors do
    reason: str


class _Row(NamedTuple):
    """A readable row. `row` counts the file's lines from 0."""

    row: int
    id: str
    text: str  # after the template
    answer: str
    source: str


class PromptSet:
    """The usable rows of one file, in file order: a sequence of `Prompt`, made on access.

    Raises:
        UserError: the file cannot be read or holds no usable row, or the tokenizer has no chat template.
    """

    def __init__(
        self,
        path: Path,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        limit: int | None = None,
        training: bool = False,
    ) -> None:
        """Read, template, tokenise and filter.

        Args:
            path: JSONL file.
            config: columns, template and length limit.
            tokenizer: turns a prompt into token ids; its own special tokens are added unless the chat template did.
            limit: stop after so many usable rows.
            training: leave out rows flagged `overlaps_benchmark`.
        """
        self.path = path
        self.skipped: list[Skipped] = []
        self._rows: list[_Row] = []
        self._tokens = array("i")
        self._ends = array("q", [0])
        for block in _blocks(self._readable_rows(config, tokenizer, training), TOKENIZE_ROWS):
            self._add(block, config, tokenizer)
            if limit is not None and len(self) >= limit:
                del self._rows[limit:], self._ends[limit + 1 :]
                break
        self._report()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        row = self._rows[index]
        token_ids = tuple(self._tokens[self._ends[index] : self._ends[index + 1]])
        return Prompt(row.row, row.id, row.text, token_ids, row.answer, row.source)

    def fingerprint(self) -> str:
        """A digest of what the prompts are, so that a position is never taken up in another data set."""
        digest = hashlib.sha256(self._tokens.tobytes())
        digest.update(self._ends.tobytes())
        for row in self._rows:
            digest.update(f"{row.id}\0{row.answer}\0".encode())
        return digest.hexdigest()[:16]

    def _readable_rows(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, training: bool
    ) -> Iterator[_Row]:
        for number, line in _lines(self.path):
            if not line.strip():
                continue
            record = _parse(line)
            if isinstance(record, str):
                self.skipped.append(Skipped(number + 1, record))
                continue
            if training and record.get("overlaps_benchmark"):
                self.skipped.append(Skipped(number + 1, "flagged overlaps_benchmark"))
                continue
            question = _text(record.get(config.question_column))
            answer = _text(record.get(config.answer_column)).strip()
            if not question.strip() or not answer:
                column = config.answer_column if question.strip() else config.question_column
                self.skipped.append(Skipped(number + 1, f"no {column!r}"))
                continue
            text = render(question, config, tokenizer)
            identity = _text(record.get("id")) or f"{self.path.stem}-{number}"
            yield _Row(number, identity, text, answer, _text(record.get("source")) or self.path.stem)

    def _add(self, block: list[_Row], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        encoded = tokenizer([row.text for row in block], add_special_tokens=not config.chat_template)["input_ids"]
        for row, ids in zip(block, encoded, strict=True):
            if not ids:
                self.skipped.append(Skipped(row.row + 1, "no token"))
            elif len(ids) > config.max_prompt_tokens:
                reason = f"{len(ids)} tokens, more than data.max_prompt_tokens {config.max_prompt_tokens}"
                self.skipped.append(Skipped(row.row + 1, reason))
            else:
                self._rows.append(row)
                self._tokens.extend(ids)
                self._ends.append(len(self._tokens))

    def _report(self) -> None:
        """One warning for all skipped rows; an error when nothing is left."""
        self.skipped.sort()
        named = "; ".join(f"line {skip.line}: {skip.reason}" for skip in self.skipped[:NAMED_ROWS])
        more = f"; and {len(self.skipped) - NAMED_ROWS} more" if len(self.skipped) > NAMED_ROWS else ""
        if not self._rows:
            what = f"no usable row ({named}{more})" if self.skipped else "the data set is empty"
            raise UserError(what, where=str(self.path), mend="give JSONL rows with the question and answer columns")
        if self.skipped:
            logger.warning("%s: skipped %d rows (%s%s)", self.path, len(self.skipped), named, more)


class PromptStream:
    """Prompts without end: every epoch holds each usable row exactly once, in an order drawn from seed and epoch.

    A batch that begins at the end of an epoch goes on in the next one, so no prompt is lost or repeated within an epoch.

    Example:
        stream = PromptStream(config.data, tokenizer, seed=0)
        prompts = stream.take(128)
        state = stream.state_dict()  # {"epoch": 0, "index": 128, "fingerprint": "3f0c..."}
    """

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> None:
        self._prompts = PromptSet(Path(config.train), config, tokenizer, training=True)
        self._shuffle = config.shuffle
        self._seed = seed
        self._fingerprint = self._prompts.fingerprint()
        self._seek(0, 0)

    @property
    def skipped(self) -> list[Skipped]:
        """Rows left out, in file order."""
        return self._prompts.skipped

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self._epoch

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self._prompts)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        taken = []
        for _ in range(count):
            taken.append(self._prompts[self._order[self._index]])
            self._index += 1
            if self._index == len(self._order):
                self._seek(self._epoch + 1, 0)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; plain JSON values."""
        return {"epoch": self._epoch, "index": self._index, "seed": self._seed, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the prompt that would have come next.

        Raises:
            UserError: the position belongs to other data or another seed.
        """
        for key, own in (("fingerprint", self._fingerprint), ("seed", self._seed)):
            if state[key] != own:
                raise UserError(
                    f"the saved data position belongs to another {key} ({state[key]!r}, now {own!r})",
                    where=str(self._prompts.path),
                    mend="resume with the data, template and seed the run was started with",
                )
        self._seek(state["epoch"], state["index"])

    def _seek(self, epoch: int, index: int) -> None:
        self._epoch, self._index = epoch, index
        self._order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)


def load_prompts(
    path: Path, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, limit: int | None = None
) -> list[Prompt]:
    """All usable rows of an evaluation file, in file order; `limit` keeps the first so many.

    Raises:
        UserError: the file cannot be read or holds no usable row.
    """
    return list(PromptSet(Path(path), config, tokenizer, limit=limit))


def render(question: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt's text: the template with the question put in, or the tokenizer's chat template."""
    if not config.chat_template:
        return config.template.replace("{question}", question)
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "data.chat_template is true, but the tokenizer has no chat template",
            where="config: data.chat_template",
            mend="set it to false and give data.template, or use a chat model's tokenizer",
        )
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    turns = [*system, {"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


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


def _text(value: Any) -> str:
    """A column's value as text: numbers are written out, anything but a string or a number counts as absent."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else ""


def _blocks(rows: Iterator[_Row], size: int) -> Iterator[list[_Row]]:
    block: list[_Row] = []
    for row in rows:
        block.append(row)
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block

