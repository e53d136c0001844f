"""A character tokenizer made on the spot: every printable ASCII character is a token."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

DATA = Path(__file__).resolve().parents[2] / "data"

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; no chat template."""
    vocabulary = {character: index for index, character in enumerate(string.printable)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="~"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.fixture(scope="session")
def chat_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same, with a chat template that writes <s>, <u> and <a> before the turns."""
    with_template = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with_template.chat_template = CHAT_TEMPLATE
    return with_template
