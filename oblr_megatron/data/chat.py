"""A conversation -> text by the tokenizer's chat template, the same on every day. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TODAY = date(2024, 7, 26)
"""The date for chat templates that ask for it (`strftime_now`), so that a resumed run has the same prompts. It is the
default of Llama 3.1's template."""


def with_chat_template(
    turns: Sequence[Mapping[str, Any]], options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> str:
    """A conversation and the beginning of the policy's next turn.

    Args:
        turns: messages with a role and a content.
        options: of the template (data.chat_template_options).
        tokenizer: with a chat template.

    Raises:
        Exception: the template's own, of any class.
    """
    asked = {**options, "tokenize": False, "add_generation_prompt": True, "strftime_now": TODAY.strftime}
    return str(tokenizer.apply_chat_template([dict(turn) for turn in turns], **asked))
