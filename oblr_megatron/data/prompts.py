"""Rows -> prompts: template, length filter, a shuffle per epoch, and an exact position to resume from.

Every row is read and tokenised once, when the set is opened: the length filter has to see each row anyway, and only
then can an unusable set be refused before anything is started. What is kept of a row is its text, its answer and its
token ids (32-bit integers in one flat array), about 1 kB for a row of competition mathematics.
"""

from __future__ import annotations

import hashlib
import logging
import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from oblr_megatron.data.rows import Row, Skipped, read_rows
from oblr_megatron.errors import UserError
from oblr_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config import DataConfig

logger = logging.getLogger(__name__)

TOKENIZE_ROWS = 1024  # rows handed to the tokenizer at once
NAMED_ROWS = 5  # skipped rows that the warning names


class PromptSet(Sequence[Prompt]):
    """The usable rows of one file, in file order: a sequence of `Prompt`, made on access.

    `skipped` names the rows left out, in file order.
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
            limit: keep the first so many usable rows.
            training: leave out rows flagged `overlaps_benchmark`.

        Raises:
            UserError: the file cannot be read or holds no usable row, or the tokenizer has no chat template.
        """
        self.path = path
        self.skipped: list[Skipped] = []
        self._rows: list[Row] = []
        self._texts: list[str] = []
        self._tokens = array("i")
        self._ends = array("q", [0])
        rows = read_rows(path, config, self.skipped, training=training)
        while (limit is None or len(self) < limit) and (block := list(islice(rows, TOKENIZE_ROWS))):
            self._add(block, config, tokenizer, limit)
        self._report()

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
        return Prompt(row.row, row.id, text, token_ids, row.answer, row.source)

    def fingerprint(self) -> str:
        """A digest of what the prompts are, so that a position is never taken up in another data set."""
        digest = hashlib.sha256(self._tokens.tobytes())
        digest.update(self._ends.tobytes())
        for row in self._rows:
            digest.update(f"{row.id}\0{row.answer}\0".encode())
        return digest.hexdigest()[:16]

    def _add(self, block: list[Row], config: DataConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> None:
        texts = [render(row.question, config, tokenizer) for row in block]
        encoded = tokenizer(texts, add_special_tokens=not config.chat_template)["input_ids"]
        for row, text, ids in zip(block, texts, encoded, strict=True):
            if len(self) == limit:
                return
            if 0 < len(ids) <= config.max_prompt_tokens:
                self._rows.append(row._replace(question=""))  # the text holds it
                self._texts.append(text)
                self._tokens.extend(ids)
                self._ends.append(len(self._tokens))
            else:
                reason = f"{len(ids)} tokens, data.max_prompt_tokens is {config.max_prompt_tokens}"
                self.skipped.append(Skipped(row.row + 1, reason))

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

    A batch that begins at the end of an epoch goes on in the next one: within an epoch no prompt is lost or repeated.

    Example:
        stream = PromptStream(config.data, tokenizer, seed=0)
        prompts = stream.take(128)
        state = stream.state_dict()  # {"epoch": 0, "index": 128, "seed": 0, "fingerprint": "3f0c..."}
    """

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> None:
        """Open config.train.

        Raises:
            UserError: see `PromptSet`.
        """
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
    def num_skipped(self) -> int:
        """How many rows that is."""
        return len(self._prompts.skipped)

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self._epoch

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self._prompts)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        return list(islice(self._forever(), count))

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; plain JSON values."""
        return {"epoch": self._epoch, "index": self._index, "seed": self._seed, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the prompt that would have come next.

        Raises:
            UserError: the position belongs to other data or another seed.
        """
        for key, own in (("fingerprint", self._fingerprint), ("seed", self._seed)):
            if state.get(key) != own:
                raise UserError(
                    f"the saved data position belongs to another {key} ({state.get(key)!r}, now {own!r})",
                    where=str(self._prompts.path),
                    mend="resume with the data, template and seed the run was started with",
                )
        self._seek(state["epoch"], state["index"])

    def _forever(self) -> Iterator[Prompt]:
        while True:
            prompt = self._prompts[self._order[self._index]]
            self._index += 1
            if self._index == len(self._order):
                self._seek(self._epoch + 1, 0)
            yield prompt

    def _seek(self, epoch: int, index: int) -> None:
        self._epoch, self._index = epoch, index
        self._order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)


def load_prompts(
    path: str | Path, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, limit: int | None = None
) -> list[Prompt]:
    """All usable rows of an evaluation file, in file order; `limit` keeps the first so many.

    Raises:
        UserError: the file cannot be read or holds no usable row.
    """
    return list(PromptSet(Path(path), config, tokenizer, limit=limit))


def render(question: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt's text: the template with the question put in, or the tokenizer's chat template.

    Raises:
        UserError: the tokenizer has no chat template.
    """
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
