"""A tokenizer with one token for each printable ASCII character, and helpers that write rows to files."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oblr_megatron.config import DataConfig
from oblr_megatron.data.prompts import PromptStream

DATA = Path(__file__).resolve().parents[2] / "data"
SUMS = DATA / "sums.jsonl"

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character; no chat template."""
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


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """Prevent downloads. `datasets` reads the variable when imported, the hub client at every request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


def config(train: object = SUMS, **values: object) -> DataConfig:
    """A [data] section; `train` is one source or a list of sources."""
    return DataConfig.model_validate({"train": train, **values})


def stream(
    tokenizer: PreTrainedTokenizerFast, train: object = SUMS, *, seed: int = 0, **values: object
) -> PromptStream:
    """The training prompts of a [data] section."""
    return PromptStream(config(train, **values), tokenizer, seed=seed)


def write_rows(path: Path, rows: Iterable[dict[str, object]]) -> Path:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sums(path: Path, count: int, first: int = 0) -> Path:
    """Write different sums: row n asks for n + 1."""
    rows = ({"question": f"{number} + 1 = ?", "answer": number + 1} for number in range(first, first + count))
    return write_rows(path, rows)
