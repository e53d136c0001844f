"""A question -> the prompt's text: data.template, or the tokenizer's own chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config.data import DataConfig
    from oblr_megatron.data.rows import Messages, Question

_OURS = {"conversation", "tokenize", "add_generation_prompt", "continue_final_message", "return_tensors", "return_dict"}


class RefusedError(ValueError):
    """The chat template does not take this conversation."""


def check_template(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse what no row could be rendered with.

    Raises:
        UserError: the tokenizer has no chat template, or an option is not for it.
    """
    if not config.chat_template:
        return
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "data.chat_template is true, but the tokenizer has no chat template",
            where="config: data.chat_template",
            fix="set it to false and give data.template, or use a chat model's tokenizer",
        )
    if taken := sorted(_OURS & set(config.chat_template_options)):
        raise UserError(
            f"data.chat_template_options may not set {', '.join(taken)}",
            where="config: data.chat_template_options",
            fix="give only what the tokenizer's chat template reads, e.g. enable_thinking",
        )


def render(question: Question, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt's text.

    A question of text is put into data.template, which with data.chat_template is the user turn. A conversation is
    rendered as it stands; without a chat template it has to be a single user turn, which counts as text.

    Raises:
        UserError: a conversation of several turns and no chat template.
        RefusedError: the chat template does not take the conversation, e.g. because it knows no system turn.
    """
    from jinja2 import TemplateError

    if not config.chat_template:
        return _fill(_only_turn(question), config)
    turns = [{"role": "user", "content": _fill(question, config)}] if isinstance(question, str) else question
    if config.system_prompt and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": config.system_prompt}, *turns]
    options = {**config.chat_template_options, "tokenize": False, "add_generation_prompt": True}
    try:
        return str(tokenizer.apply_chat_template(turns, **options))
    except TemplateError as error:
        raise RefusedError(str(error)) from error


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
            fix="set it to true, or name a column of text in question_column",
        )
    return messages[0]["content"]
