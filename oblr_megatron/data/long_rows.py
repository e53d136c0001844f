"""Finds rows that are far too long from the beginning of their text, so that no huge text is tokenized whole.

A tokenizer needs about 400 bytes of memory and a microsecond for each token: 50 MB of text would take 20 GB and a
minute. Rows that are only a little too long are counted as a whole, by `PromptSet`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oblr_megatron.data.rows import Row, plain_text
from oblr_megatron.data.template import RefusedError, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config.data import DataConfig

CHARACTERS_PER_TOKEN = 16
"""Of a text that is simply counted. English has about 4, so a longer text is almost always too long."""
GROWTH = 4
"""A beginning that does not show whether the text is too long is extended by this factor."""
SHRINKAGE = 4
"""Most characters that Unicode normalization turns into one: canonical decompositions have at most four."""


class LongRows:
    """Recognizes texts with more than data.max_prompt_tokens tokens. A text that fits is never taken for one.

    Both tests assume that a tokenizer works from left to right, so that the tokens of a beginning, except those at its
    end, are tokens of the whole text or cover the same characters.
    """

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Args:
        config: template and length limit.
        tokenizer: only a fast tokenizer tells where its tokens lie; with another, no text is recognized.
        """
        self._config, self._tokenizer = config, tokenizer
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)  # characters of a token
        self._most = config.max_prompt_tokens + self._longest  # the cut may break the last token into its characters
        self._counted = CHARACTERS_PER_TOKEN * self._most

    def exceeds(self, text: str) -> bool:
        """Whether a beginning of the text already has too many tokens."""
        size = self._counted
        while size < len(text) and self._tokenizer.is_fast:
            try:
                beginning = self._tokenizer(
                    text[:size], add_special_tokens=False, return_offsets_mapping=True, verbose=False
                )
            except Exception:  # noqa: BLE001  `PromptSet` skips what a tokenizer refuses
                return False
            words = beginning.word_ids()
            if sum(word != words[-1] for word in words) > self._most:  # the last word may go on
                return True
            if self._covered(beginning["offset_mapping"]) > SHRINKAGE * self._longest * self._most:
                return True
            size *= GROWTH
        return False

    def exceeding(self, row: Row) -> str:
        """The reason to leave a row out; empty if its prompt may fit."""
        if len(plain_text(row.question)) <= self._counted:
            return ""
        try:
            text = render(row.question, self._config, self._tokenizer)
        except RefusedError:  # `PromptSet` gives the template's reason
            return ""
        return too_long(self._config) if self.exceeds(text) else ""

    def _covered(self, spans: list[tuple[int, int]]) -> int:
        """Characters that tokens stand for, each token for at most `_longest`: an unknown word has one token."""
        covered = reached = 0
        for start, end in spans:
            covered += min(max(0, end - max(start, reached)), self._longest)
            reached = max(reached, end)
        return covered


def too_long(config: DataConfig) -> str:
    """The reason why a row is skipped."""
    return f"longer than data.max_prompt_tokens {config.max_prompt_tokens}"
