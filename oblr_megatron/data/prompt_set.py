"""Rows -> prompts: template, tokens, length filter, and what is said of the rows left out.

Every row is read and tokenised once, when the set is opened: the length filter has to see each row anyway, and only
then can an unusable set be refused before anything is started. What is kept of a row is its text, its answer and its
token ids (32-bit integers in one flat array), about 1 kB for a row of competition mathematics.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, overload

from oblr_megatron.data.rows import Row, Skipped, read_rows
from oblr_megatron.data.template import RefusedError, check_template, render
from oblr_megatron.errors import UserError
from oblr_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config.data import DataConfig, SourceConfig

logger = logging.getLogger(__name__)

TOKENIZE_ROWS = 1024  # rows handed to the tokenizer at once
NAMED_ROWS = 3  # of each reason, in the warning


class PromptSet(Sequence[Prompt]):
    """The usable rows of one source, in file order: a sequence of `Prompt`, made on access.

    `skipped` names the rows left out, in file order.
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
        """Template, tokenise and filter.

        Args:
            path: of the source, as configured.
            rows: its rows, in file order.
            skipped: those left out so far, and while `rows` is read; belongs to the set from now on.
            config: template and length limit.
            tokenizer: turns a prompt into token ids; its own special tokens are added unless the chat template did.
            limit: keep the first so many usable rows.

        Raises:
            UserError: no row is left, or the template cannot be applied.
        """
        check_template(config, tokenizer)
        self.path = path
        self.skipped = skipped
        self._rows: list[Row] = []
        self._texts: list[str] = []
        self._tokens = array("i")
        self._ends = array("q", [0])
        remaining = iter(rows)
        while (limit is None or len(self) < limit) and (block := list(islice(remaining, TOKENIZE_ROWS))):
            self._add(block, config, tokenizer, limit)
        self.skipped.sort(key=lambda skip: (skip.file, skip.line))
        self._check_not_empty()

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        row, text = self._rows[index], self._texts[index]
        position = index % len(self)
        token_ids = tuple(self._tokens[self._ends[position] : self._ends[position + 1]])
        return Prompt(row.row, row.id, text, token_ids, row.answer, row.source, row.tolerance)

    def fingerprint(self) -> str:
        """A digest of what the prompts are, so that a position is never taken up in another data set."""
        digest = hashlib.sha256(self._tokens.tobytes())
        digest.update(self._ends.tobytes())
        for row in self._rows:
            tolerance = f"{row.tolerance}\0" if row.tolerance else ""
            digest.update(f"{row.id}\0{row.answer}\0{tolerance}".encode())
        return digest.hexdigest()[:16]

    def _add(self, block: list[Row], config: DataConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> None:
        rendered = list(self._rendered(block, config, tokenizer))
        if not rendered:
            return
        texts = [text for _, text in rendered]
        encoded = tokenizer(texts, add_special_tokens=not config.chat_template)["input_ids"]
        for (row, text), ids in zip(rendered, encoded, strict=True):
            if len(self) == limit:
                return
            if 0 < len(ids) <= config.max_prompt_tokens:
                self._rows.append(row._replace(question=""))  # the text holds it
                self._texts.append(text)
                self._tokens.extend(ids)
                self._ends.append(len(self._tokens))
            elif ids:
                self._skip(row, f"longer than data.max_prompt_tokens {config.max_prompt_tokens}", f"{len(ids)} tokens")
            else:
                self._skip(row, "no tokens")

    def _rendered(
        self, block: list[Row], config: DataConfig, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[tuple[Row, str]]:
        for row in block:
            try:
                yield row, render(row.question, config, tokenizer)
            except RefusedError as error:
                self._skip(row, "refused by the chat template", str(error))

    def _skip(self, row: Row, reason: str, detail: str = "") -> None:
        self.skipped.append(row.left_out(self.path, reason, detail))

    def _check_not_empty(self) -> None:
        if not self._rows:
            what = f"no usable row ({summary(self.skipped)})" if self.skipped else "the data set is empty"
            raise UserError(what, where=self.path, fix="give rows with the question and answer columns")


def load_prompts(
    source: SourceConfig, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, limit: int | None = None
) -> list[Prompt]:
    """All usable rows of a held-out set, in file order; `limit` keeps the first so many.

    Raises:
        UserError: the source cannot be read or holds no usable row.
    """
    return list(read_prompts(source, config, tokenizer, limit=limit))


def read_prompts(
    source: SourceConfig,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int | None = None,
    training: bool = False,
) -> PromptSet:
    """The rows of one source as they are, duplicates and all; says in one warning what was left out.

    Args:
        source: what to read.
        config: columns, template and length limit.
        tokenizer: see `PromptSet`.
        limit: keep the first so many usable rows.
        training: leave out rows flagged `overlaps_benchmark`, and take the convention's training split.

    Raises:
        UserError: the source cannot be read or holds no usable row.
    """
    skipped: list[Skipped] = []
    rows = read_rows(source, config, skipped, training=training)
    prompts = PromptSet(source.path, rows, skipped, config, tokenizer, limit=limit)
    warn_of([prompts])
    return prompts


def warn_of(sets: Sequence[PromptSet]) -> None:
    """One warning for the rows left out of all sets."""
    said = [
        f"{prompts.path}: left out {len(prompts.skipped)} rows ({summary(prompts.skipped)})"
        for prompts in sets
        if prompts.skipped
    ]
    if said:
        logger.warning("%s", "; ".join(said))


def summary(skipped: Sequence[Skipped]) -> str:
    """Rows left out by reason, the most frequent first: "12 duplicate (lines 4, 9, 30, ...), 1 not JSON (line 5)"."""
    by_reason: dict[str, list[Skipped]] = {}
    for skip in skipped:
        by_reason.setdefault(skip.reason, []).append(skip)
    groups = sorted(by_reason.values(), key=len, reverse=True)
    several = len({skip.file for skip in skipped}) > 1
    return ", ".join(f"{len(group)} {group[0].reason} ({_lines(group, several)})" for group in groups)


def _lines(group: Sequence[Skipped], several_files: bool) -> str:
    named = [
        (f"{skip.file}:" if several_files else "") + str(skip.line) + (f": {skip.detail}" if skip.detail else "")
        for skip in group[:NAMED_ROWS]
    ]
    more = ["..."] if len(group) > NAMED_ROWS else []
    return ("line " if len(group) == 1 else "lines ") + ", ".join(named + more)
