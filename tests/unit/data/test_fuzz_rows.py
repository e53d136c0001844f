"""Random rows: whatever a line holds, it costs itself alone, and the good row next to it is kept.

Not covered: parquet and hub data sets. Their values have types.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from oblr_megatron.config.data import SourceConfig
from oblr_megatron.data.conventions import CONVENTIONS
from oblr_megatron.data.prompt_set import PromptSet, read_prompts
from oblr_megatron.data.rows import plain_text, read_rows
from oblr_megatron.data.sources import open_source
from oblr_megatron.data.training import training_sets
from oblr_megatron.errors import UserError
from tests.unit.data.conftest import config

GOOD = {"question": "1+1=", "problem": "1+1=", "prompt": "1+1=", "answer": "2", "final_answer": "2", "id": "good"}
COLUMNS = (
    "question",
    "problem",
    "prompt",
    "answer",
    "solution",
    "final_answer",
    "answer_latex",
    "id",
    "source",
    "error",
)
KEYS = st.sampled_from(
    [*COLUMNS, "reward_model", "ground_truth", "role", "content", "overlaps_benchmark", "tolerance", "x"]
)
TEXTS = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["#### 7", r"\boxed{7", "1e99999", "-0007.0", "5%", "user", " "]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
TALKS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", ""]) | TEXTS, "content": TEXTS},
        optional={"name": VALUES, "tool_calls": VALUES},
    ),
    max_size=3,
)
ROWS = st.dictionaries(KEYS, VALUES | TALKS, max_size=6)
LINES = (
    st.binary(max_size=40)
    | ROWS.map(lambda row: json.dumps(row).encode())
    | ROWS.map(lambda row: json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    | VALUES.map(lambda value: json.dumps(value).encode())
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(LINES.map(lambda line: line.replace(b"\n", b" ")), max_size=4),
    convention=st.sampled_from(["", *CONVENTIONS]),
    chat=st.booleans(),
    keep=st.booleans(),
)
def test_a_line_costs_itself_alone(
    chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, lines: list[bytes], convention: str, chat: bool, keep: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    written = b"\n".join([*lines, json.dumps(GOOD).encode()]) + b"\n"
    path.write_bytes(written)
    source = {"path": str(path), "convention": convention}
    data = config(source, chat_template=chat, max_prompt_tokens=64, exclude=source, keep_columns=keep)
    try:
        evaluated = read_prompts(data.train[0], data, chat_tokenizer)
        [trained] = training_sets(data.model_copy(update={"exclude": ()}), chat_tokenizer, {})
    except UserError as error:
        assert not chat and error.where == "config: data.chat_template", "a conversation of several messages"
        return
    with pytest.raises(UserError):  # every row overlaps itself
        training_sets(data, chat_tokenizer, {})
    check(evaluated, written)
    check(trained, written)
    assert path.read_bytes() == written


def check(prompts: PromptSet, written: bytes) -> None:
    """Every line is a prompt or skipped; the good one is a prompt; all that is kept can be written down."""
    lines = sum(1 for line in written.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip())
    assert len(prompts) + len(prompts.skipped) == lines
    assert any(prompt.id == "good" for prompt in prompts) or "duplicate" in str(prompts.skipped)
    for prompt in prompts:
        text: Any = [prompt.id, prompt.text, prompt.answer, prompt.source, prompt.tolerance, prompt.columns]
        json.dumps(text, ensure_ascii=False).encode()
        assert 0 < len(prompt.token_ids) <= 64 and prompt.answer.strip() and len(prompt.tolerance) < 100
    prompts.fingerprint()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS | st.sampled_from(["a" * 300, "~", "*", "[a", "**/x", "a/b", "gsm8k/", "a=b"]), convention=TEXTS)
def test_a_path_is_refused_or_read(tmp_path: Path, text: str, convention: str) -> None:
    try:
        source = SourceConfig(
            path=str(tmp_path / text) if not text.startswith("/") else str(tmp_path), convention=convention
        )
        rows = [plain_text(row.question) for row in read_rows(source, config(), [])]
        assert rows == [] and list(open_source(source)) is not None
    except (UserError, ValueError) as error:  # a ValueError is pydantic's, of the config
        assert str(error) and not list(tmp_path.iterdir())
