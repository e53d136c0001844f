"""A question -> the prompt's text, with data.template and the tokenizer's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config.data import DataConfig
    from oblr_megatron.data.rows import Messages, Question

_OURS = {"conversation", "tokenize", "add_generation_prompt", "continue_final_message", "return_tensors", "return_dict"}


class RefusedError(ValueError):
    """The chat template raised an error for this conversation."""


def check_template(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check data.chat_template and data.chat_template_options against the tokenizer.

    Raises:
        UserError: the tokenizer has no chat template, or an option is reserved.
    """
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


def render(question: Question, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt's text.

    A text question is inserted into data.template; with data.chat_template the result is the user turn. A conversation
    is rendered unchanged. Without a chat template it must be a single user turn, which is handled as text.

    Raises:
        UserError: a conversation of several turns, but no chat template.
        RefusedError: the chat template raised an error, e.g. because it supports no system turn.
    """
    if not config.chat_template:
        return _fill(_only_turn(question), config)
    turns = [{"role": "user", "content": _fill(question, config)}] if isinstance(question, str) else question
    if config.system_prompt and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": config.system_prompt}, *turns]
    options = {**config.chat_template_options, "tokenize": False, "add_generation_prompt": True}
    try:
        return str(tokenizer.apply_chat_template(turns, **options))
    except Exception as error:  # a template runs arbitrary expressions on the values of a row
        raise RefusedError(" ".join(str(error).split())[:300] or type(error).__name__) from error


def _fill(question: str, config: DataConfig) -> str:
    return config.template.replace("{question}", question)


def _only_turn(question: Question) -> str:
    if isinstance(question, str):
        return question
    messages: Messages = question
    if len(messages) > 1:
        raise UserError(
            f"a question is a conversation of {len(messages)} messages, but data.chat_template is false",
            where="config: data.chat_template",
            fix="set it to true, or use a text column as question_column",
        )
    return messages[0]["content"]
