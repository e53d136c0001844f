"""A question -> the prompt's text, with data.template and the tokenizer's chat template.

`LongRows` finds rows that are far too long from the beginning of their text, so that no huge text is tokenized whole.
A tokenizer needs about 400 bytes of memory and a microsecond for each token: 50 MB of text would take 20 GB and a
minute. Rows that are only a little too long are counted as a whole, by `PromptSet`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from oblr_megatron.data.chat import with_chat_template
from oblr_megatron.data.rows import LOST_BACKSLASH, Question, Row, has_lost_backslash, plain_text
from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config.data import DataConfig

_OURS = {"conversation", "tokenize", "add_generation_prompt", "continue_final_message", "return_tensors", "return_dict"}
_OURS |= {"strftime_now"}
CHARACTERS_PER_TOKEN = 16
"""Characters per token up to which a text is tokenized whole. English has about 4, so longer texts rarely fit."""
GROWTH = 4
"""A beginning that does not show whether the text is too long is extended by this factor."""
SHRINKAGE = 4
"""Most characters that Unicode normalization turns into one: canonical decompositions have at most four."""


class RefusedError(ValueError):
    """The chat template raised an error for this conversation."""


def check_template(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check data.chat_template and data.chat_template_options against the tokenizer.

    Raises:
        UserError: the tokenizer has no chat template, or one that refuses data.system_prompt; an option is reserved;
            or a backslash of the prompt is lost.
    """
    for key, words in (("template", config.template), ("system_prompt", config.system_prompt)):
        if has_lost_backslash(words):
            raise UserError(
                f"data.{key} has {LOST_BACKSLASH}: {words!r:.80}",
                where=f"config: data.{key}",
                fix="write the text in single quotes, or double its backslashes",
            )
    if not config.chat_template:
        return
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "data.chat_template is true, but the tokenizer has no chat template",
            where="config: data.chat_template",
            fix="set it to false and use data.template, or use the tokenizer of a chat model",
        )
    if taken := sorted(_OURS & set(config.chat_template_options)):
        raise UserError(
            f"data.chat_template_options sets {', '.join(taken)}, which this package sets itself",
            where="config: data.chat_template_options",
            fix="give only options that the tokenizer's chat template reads, e.g. enable_thinking",
        )
    template = str(tokenizer.chat_template)
    if unread := [name for name in config.chat_template_options if not re.search(rf"\b{re.escape(name)}\b", template)]:
        if unread[0] == "tools":  # which the environment has set
            raise UserError(
                "the chat template describes no tools",
                where="config: rollout.environment.tools",
                fix="use a model with a chat template that reads `tools`",
            )
        raise UserError(
            f"the chat template reads no option {unread[0]!r}, which data.chat_template_options sets",
            where="config: data.chat_template_options",
            fix="correct its name, or leave it out",
        )
    if config.system_prompt:
        _check_system_prompt(config, tokenizer)


def _check_system_prompt(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse data.system_prompt if only that makes the chat template fail: some models have no system turn."""
    question = {"role": "user", "content": "?"}
    try:
        _rendered([question], config, tokenizer)
    except RefusedError:  # `PromptSet` gives the reason with its rows
        return
    try:
        _rendered([{"role": "system", "content": config.system_prompt}, question], config, tokenizer)
    except RefusedError as error:
        raise UserError(
            f"the chat template refuses data.system_prompt: {error}",
            where="config: data.system_prompt",
            fix="leave it out, and put its text into data.template",
        ) from error


def _rendered(turns: list[dict[str, Any]], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The conversation's text.

    Raises:
        RefusedError: the chat template raised an error.
    """
    try:
        return with_chat_template(turns, config.chat_template_options, tokenizer)
    except Exception as error:  # a template runs arbitrary expressions on the values of a row
        raise RefusedError(" ".join(str(error).split())[:300] or type(error).__name__) from error


def render(question: Question, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt's text.

    A text question is inserted into data.template; with data.chat_template the result is the user turn. A conversation
    is rendered unchanged. Without a chat template it must be a single user turn, which is handled as text.

    Raises:
        UserError: a conversation of several turns, but no chat template.
        RefusedError: the chat template raised an error, e.g. because it supports no system turn.
    """
    if not config.chat_template:
        if not isinstance(question, str):
            if len(question) > 1:
                raise UserError(
                    f"a question is a conversation of {len(question)} messages, but data.chat_template is false",
                    where="config: data.chat_template",
                    fix="set it to true, or use a text column as question_column",
                )
            question = question[0]["content"]
        return _fill(question, config)
    turns = [{"role": "user", "content": _fill(question, config)}] if isinstance(question, str) else question
    if config.system_prompt and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": config.system_prompt}, *turns]
    return _rendered(turns, config, tokenizer)


def _fill(question: str, config: DataConfig) -> str:
    return config.template.replace("{question}", question)


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
