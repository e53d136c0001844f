"""Rows -> prompts: template, tokenization, length filter, and a report of the skipped rows.

Every row is read and tokenized once, when the set is opened. The length filter needs this, and an unusable set is found
before any process starts. The set keeps text, answer and token ids (32-bit integers in one flat array) of each row:
about 1 kB for a row of competition mathematics.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from oblr_megatron.data.rows import LOST_BACKSLASH, NO_TEXT, Row, Skipped, read_rows
from oblr_megatron.data.sources import LONE_BACKSLASH, ONE_PER_LINE
from oblr_megatron.data.template import LongRows, RefusedError, check_template, render, too_long
from oblr_megatron.errors import UserError
from oblr_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config.data import DataConfig, SourceConfig

logger = logging.getLogger(__name__)

TOKENIZE_ROWS, TOKENIZE_CHARACTERS = 1024, 2**20  # most rows of one call of the tokenizer, and their characters
KEEP_DUPLICATES = "set data.deduplicate = false to keep rows that ask the same question, or give other rows"
NAMED_ROWS = 3  # rows named in the warning for each reason


class PromptSet:
    """The usable rows of one source in file order, as `Prompt`s made on access.

    `skipped` lists the skipped rows in file order.
    """

    def __init__(
        self,
        path: str,
        rows: Iterable[Row],
        skipped: list[Skipped],
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        limit: int | None = None,
    ) -> None:
        """Render, tokenize and filter the rows.

        Args:
            path: of the source, as configured.
            rows: of the source, in file order.
            skipped: rows skipped earlier and while `rows` is read; the set takes ownership of the list.
            config: template and length limit.
            tokenizer: adds its special tokens, unless a chat template renders the prompt.
            limit: keep only the first `limit` usable rows.

        Raises:
            UserError: no usable row, or the template cannot be applied.
        """
        check_template(config, tokenizer)
        self.path = path
        self.skipped = skipped
        self._rows: list[Row] = []
        self._texts: list[str] = []
        self._tokens = array("i")
        self._ends = array("q", [0])
        only_talk = config.chat_template
        for row, text, ids in islice(self._fitting(rows, config, tokenizer), limit):
            only_talk &= not isinstance(row.question, str)
            self._rows.append(row._replace(question=""))  # `text` contains the question
            self._texts.append(text)
            self._tokens.extend(ids)
            self._ends.append(len(self._tokens))
        self.skipped.sort(key=lambda skip: (skip.file, skip.line))
        if not self._rows:
            raise without_rows(path, skipped)
        if only_talk and config.template != "{question}":
            fix = "put its text into data.system_prompt or into the rows"
            logger.warning("data.template is not used: every question of %s is a conversation. Fix: %s", path, fix)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Prompt:
        """A prompt by its position, counted from 0."""
        row, text = self._rows[index], self._texts[index]
        token_ids = tuple(self._tokens[self._ends[index] : self._ends[index + 1]])
        return Prompt(row.row, row.id, text, token_ids, row.answer, row.source, row.tolerance, row.columns)

    def fingerprint(self) -> str:
        """A digest of the prompts. A saved data position stores it, so that resuming with other data is refused."""
        digest = hashlib.sha256(self._tokens.tobytes())
        digest.update(self._ends.tobytes())
        for row in self._rows:
            tolerance = f"{row.tolerance}\0" if row.tolerance else ""
            columns = f"{row.columns}\0" if row.columns else ""  # a position of a run without them stays valid
            digest.update(f"{row.id}\0{row.answer}\0{tolerance}{columns}".encode())
        return digest.hexdigest()[:16]

    def _fitting(
        self, rows: Iterable[Row], config: DataConfig, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[tuple[Row, str, list[int]]]:
        """Each row that fits, with its text and token ids."""
        options = {"add_special_tokens": not config.chat_template, "verbose": False}
        for block in _blocks(self._rendered(rows, config, tokenizer)):
            encoded = _encoded([text for _, text in block], tokenizer, options)
            for (row, text), ids in zip(block, encoded, strict=True):
                if ids is None:
                    self._skip(row, "refused by the tokenizer")
                elif not ids:
                    self._skip(row, "no tokens")
                elif len(ids) > config.max_prompt_tokens:
                    self._skip(row, too_long(config), f"{len(ids)} tokens")
                else:
                    yield row, text, ids

    def _rendered(
        self, rows: Iterable[Row], config: DataConfig, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[tuple[Row, str]]:
        """Each row with its text, without those that the template refuses and those that are far too long."""
        long_rows = LongRows(config, tokenizer)
        for row in rows:
            try:
                text = render(row.question, config, tokenizer)
            except RefusedError as error:
                self._skip(row, "refused by the chat template", str(error))
                continue
            if long_rows.exceeds(text):
                self._skip(row, too_long(config), f"{len(text):,} characters")
            else:
                yield row, text

    def _skip(self, row: Row, reason: str, detail: str = "") -> None:
        self.skipped.append(row.left_out(self.path, reason, detail))


def _encoded(texts: list[str], tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> list[list[int] | None]:
    """The token ids of each text; None for one that the tokenizer refuses, e.g. for a character that it lacks."""
    try:
        return list(tokenizer(texts, **options)["input_ids"])
    except Exception:  # noqa: BLE001  tokenizers raises plain Exceptions; one of them ends a whole batch
        return [None] if len(texts) == 1 else [_encoded([text], tokenizer, options)[0] for text in texts]


def _blocks(rows: Iterable[tuple[Row, str]]) -> Iterator[list[tuple[Row, str]]]:
    """The rows in groups for the tokenizer, in order."""
    block: list[tuple[Row, str]] = []
    size = 0
    for row, text in rows:
        block.append((row, text))
        size += len(text)
        if len(block) == TOKENIZE_ROWS or size >= TOKENIZE_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


def read_prompts(
    source: SourceConfig,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int | None = None,
    training: bool = False,
) -> PromptSet:
    """The usable rows of one source, duplicates included. Logs one warning about the skipped rows.

    The arguments are those of `PromptSet` and `read_rows`.

    Raises:
        UserError: the source cannot be read or has no usable row.
    """
    skipped: list[Skipped] = []
    rows = read_rows(source, config, skipped, training=training)
    prompts = PromptSet(source.path, rows, skipped, config, tokenizer, limit=limit)
    warn_of([(prompts.path, prompts.skipped)])
    return prompts


def warn_of(sets: Iterable[tuple[str, Sequence[Skipped]]]) -> None:
    """Log one warning about the skipped rows of all sets, given by path."""
    parts = [f"{path}: skipped {len(skipped)} rows ({summary(skipped)})" for path, skipped in sets if skipped]
    if parts:
        logger.warning("%s", "; ".join(parts))


def summary(skipped: Sequence[Skipped]) -> str:
    """Skipped rows by reason, most frequent first: "12 duplicate (lines 4, 9, 30, ...), 1 not JSON (line 5)"."""
    by_reason: dict[str, list[Skipped]] = {}
    for skip in skipped:
        by_reason.setdefault(skip.reason, []).append(skip)
    groups = sorted(by_reason.values(), key=len, reverse=True)
    several = len({skip.file for skip in skipped}) > 1
    return ", ".join(f"{len(group)} {group[0].reason} ({_lines(group, several)})" for group in groups)


def without_rows(path: str, skipped: Sequence[Skipped]) -> UserError:
    """The error of a data set without a usable row."""
    what = f"no usable row ({summary(skipped)})" if skipped else "the data set is empty"
    return UserError(what, where=path, fix=_fix(skipped))


def _fix(skipped: Sequence[Skipped]) -> str:
    """A fix that gives usable rows, by the most frequent reason, or by the first line of an array."""
    [(reason, _)] = Counter(skip.reason for skip in skipped).most_common(1) or [("", 0)]
    if any(skip.line == 1 and skip.reason == "not a JSON object" for skip in skipped):
        reason = "not a JSON object"
    fixes = {
        "longer than": "raise data.max_prompt_tokens, or give shorter rows",
        "not a JSON object": ONE_PER_LINE,
        LOST_BACKSLASH: "double the backslashes of LaTeX commands in JSON: \\\\frac",
        LONE_BACKSLASH: "double the backslashes of LaTeX commands in JSON: \\\\sum",
        "not JSON": f"{ONE_PER_LINE}; name a Parquet file *.parquet",
        "not UTF-8": "save the file as UTF-8; name a Parquet file *.parquet",
        "refused by the tokenizer": "give rows without the characters that it lacks",
        "refused by": "give conversations that the chat template accepts, or set data.chat_template to false",
        "duplicate": KEEP_DUPLICATES,
        "contradicted": KEEP_DUPLICATES,
        "overlapping": "give other training rows, other sets in evaluate.data, or data.overlap_threshold = 0",
        "cannot be generated": "change the options of the source",
        "flagged": "give training rows without overlaps_benchmark",
    }
    if NO_TEXT in reason:
        return 'name a column with text or numbers, or a field of it ("a.b"), as the answer column'
    given = (fix for start, fix in fixes.items() if reason.startswith(start))
    return next(given, "give rows with the question and answer columns")


def _lines(group: Sequence[Skipped], several_files: bool) -> str:
    named = [
        (f"{skip.file}:" if several_files else "") + str(skip.line) + (f": {skip.detail}" if skip.detail else "")
        for skip in group[:NAMED_ROWS]
    ]
    more = ["..."] if len(group) > NAMED_ROWS else []
    return ("line " if len(group) == 1 else "lines ") + ", ".join(named + more)


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """A digest of prompts, gold answers, tolerances and kept columns, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        columns = [prompt.columns] if prompt.columns else []
        content = [prompt.id, prompt.token_ids, prompt.answer, prompt.tolerance, *columns]
        digest.update(json.dumps(content).encode() + b"\n")
    return digest.hexdigest()
