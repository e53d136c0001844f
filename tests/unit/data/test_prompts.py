"""Prompts of one source: reading rows, templates, skipped rows.

Not covered: the chat templates of real models, and the memory of a large set.
"""

from __future__ import annotations

import json
import logging
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from oblr_megatron.data.prompt_set import read_prompts
from oblr_megatron.errors import UserError
from tests.unit.data.conftest import DATA, SUMS, config, stream, write_rows

BROKEN = DATA / "broken.jsonl"


def held_out(tokenizer: PreTrainedTokenizerFast, path: Path = SUMS, *, limit: int | None = None, **values: object):
    """`read_prompts` of the only source of a [data] section."""
    data = config(path, **values)
    return read_prompts(data.train[0], data, tokenizer, limit=limit)


def test_rows_become_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = held_out(tokenizer, template="Q: {question}\nA:")
    assert [prompt.answer for prompt in prompts] == ["3", "7", "11", "15", "10", "4", "9"]
    first = prompts[0]
    assert (first.row, first.id, first.source) == (0, "sum-1-2", "sums")
    assert first.text == "Q: 1+2=\nA:"
    assert first.token_ids == tuple(tokenizer(first.text)["input_ids"]) and len(first.token_ids) > 8


def test_a_template_may_hold_other_braces(tokenizer: PreTrainedTokenizerFast) -> None:
    template = "Solve {question} and answer in \\boxed{}."
    assert held_out(tokenizer, template=template)[0].text == "Solve 1+2= and answer in \\boxed{}."


def test_chat_template(chat_tokenizer: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast) -> None:
    plain = held_out(chat_tokenizer, chat_template=True)[0]
    assert plain.text == "<u>1+2=<a>"
    assert plain.token_ids == tuple(tokenizer(plain.text)["input_ids"])
    system = held_out(chat_tokenizer, chat_template=True, system_prompt="Be brief.")[0]
    assert system.text == "<s>Be brief.<u>1+2=<a>"


def test_an_error_if_the_tokenizer_has_no_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError) as error:
        held_out(tokenizer, chat_template=True)
    assert error.value.where == "config: data.chat_template"


@pytest.mark.parametrize(
    ("flag", "dropped"),
    [("true", True), ("MATH500", True), (1, True), ("False", False), ("0", False), (" no ", False), ("", False)],
)
def test_a_flag_written_as_text(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, flag: object, dropped: bool
) -> None:
    """As a conversion from CSV leaves it."""
    rows = [{"question": "1+1=", "answer": "2"}, {"question": "1+2=", "answer": "3", "overlaps_benchmark": flag}]
    prompts = stream(tokenizer, write_rows(tmp_path / "rows.jsonl", rows))
    assert [skip.reason for skip in prompts.skipped] == ["flagged overlaps_benchmark"] * dropped


def test_skipped_rows_and_their_reasons(tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        prompts = stream(tokenizer, BROKEN, max_prompt_tokens=20, shuffle=False)
    assert [(skip.line, skip.reason) for skip in prompts.skipped] == [
        (2, "not JSON"),
        (3, "not a JSON object"),
        (4, "no 'answer'"),
        (7, "no 'question'"),
        (8, "no 'answer'"),
        (9, "not UTF-8"),
        (10, "flagged overlaps_benchmark"),
        (11, "longer than data.max_prompt_tokens 20"),
        (12, "'answer' is no text and no number but a truth value"),
    ]
    [line] = caplog.messages
    for part in ("9 rows", "2 no 'answer' (lines 4, 8), 1 not JSON (line 2)", "(line 11: 40 tokens)"):
        assert part in line
    assert line.count(str(BROKEN)) == 1 and "\n" not in line
    taken = prompts.next_prompts(3)
    assert [(prompt.row, prompt.answer) for prompt in taken] == [(0, "2"), (5, "6"), (12, "14")]
    assert [prompt.id for prompt in taken] == ["broken-0", "numbers-are-answers", "broken-12"]


def test_the_columns_of_a_row_are_kept_on_demand(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    deep = '{"question": "1+1=", "answer": "2", "more": ' + "[" * 5000 + "]" * 5000 + "}\n"
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+2=", "answer": 3, "level": 4, "tags": ["a", "\\ud800"]}\n' + deep)
    assert [prompt.columns for prompt in held_out(tokenizer, path)][:1] == [""]
    kept = held_out(tokenizer, path, keep_columns=True)
    assert json.loads(kept[0].columns) == {"question": "1+2=", "answer": 3, "level": 4, "tags": ["a", "\ud800"]}
    assert kept[0].columns.isascii(), "half of a surrogate pair stays escaped"
    assert stream(tokenizer, path, keep_columns=True).next_prompts(1)[0].columns == kept[0].columns


def test_columns_that_json_does_not_know_become_text(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    row = {"question": "1+1=", "answer": "2", "day": date(2026, 1, 31), "raw": b"x", "size": float("inf")}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    [prompt] = held_out(tokenizer, tmp_path / "rows.parquet", keep_columns=True)
    assert json.loads(prompt.columns) == row | {"day": "2026-01-31", "raw": "b'x'"}


def test_evaluation_keeps_rows_that_overlap_a_benchmark(tokenizer: PreTrainedTokenizerFast) -> None:
    assert "10" in [prompt.answer for prompt in held_out(tokenizer, BROKEN)]


def test_limit_keeps_the_first_usable_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [prompt.answer for prompt in held_out(tokenizer, BROKEN, limit=2)] == ["2", "6"]


@pytest.mark.parametrize(
    ("content", "named"), [("", "empty"), ("\n\n", "empty"), ('{"a": 1}\n', "1 no 'question' (line 1)")]
)
def test_no_usable_row(content: str, named: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        stream(tokenizer, path)
    assert error.value.where == str(path) and named in error.value.what


def test_missing_file(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(UserError) as error:
            held_out(tokenizer, path)
        assert error.value.where == str(path)


QUESTION = [{"role": "user", "content": "1+1="}]
TUTORED = [{"role": "system", "content": "Add."}, *QUESTION]


def test_conversations_are_rendered_unchanged(chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    talk = [*QUESTION, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}]
    path = write_rows(tmp_path / "a.jsonl", [{"question": turns, "answer": 2} for turns in (QUESTION, TUTORED, talk)])
    prompts = held_out(chat_tokenizer, path, chat_template=True, template="no {question}", system_prompt="Be brief.")
    assert [prompt.text for prompt in prompts] == [
        "<s>Be brief.<u>1+1=<a>",
        "<s>Add.<u>1+1=<a>",
        "<s>Be brief.<u>1+1=<a>2<u>2+2=<a>",
    ]


def test_a_single_user_turn_is_handled_as_text(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"question": QUESTION, "answer": 2}])
    assert held_out(tokenizer, path, template="Q: {question}")[0].text == "Q: 1+1="
    path = write_rows(tmp_path / "b.jsonl", [{"question": TUTORED, "answer": 2}])
    with pytest.raises(UserError, match="2 messages") as error:
        held_out(tokenizer, path)
    assert error.value.where == "config: data.chat_template"


def test_malformed_conversations_are_skipped(chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    talk = [*QUESTION, {"role": "assistant", "content": "2"}]
    bad = [[{"role": "user"}], [{"role": "user", "content": " "}], talk, ["1+1="], []]
    rows = [{"question": turns, "answer": 2} for turns in [*bad, QUESTION]]
    prompts = stream(chat_tokenizer, write_rows(tmp_path / "a.jsonl", rows), chat_template=True)
    reason = "'question' is not a conversation that ends with a user turn"
    assert [skip[1:3] for skip in prompts.skipped] == [*((line, reason) for line in (1, 2, 3, 4)), (5, "no 'question'")]


def test_a_template_that_no_question_uses_is_told(
    chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": QUESTION, "answer": 2}]
    keys = {"chat_template": True, "template": "{question} Think."}
    stream(chat_tokenizer, write_rows(tmp_path / "a.jsonl", rows), **keys)
    assert "data.template is not used: every question of" in caplog.text
    caplog.clear()
    stream(chat_tokenizer, write_rows(tmp_path / "b.jsonl", [*rows, {"question": "1+2=", "answer": 3}]), **keys)
    assert "data.template" not in caplog.text


def test_the_template_and_chat_template_options(chat_tokenizer: PreTrainedTokenizerFast, monkeypatch) -> None:
    given = {"chat_template": True, "template": "{question} Think.", "chat_template_options": {"mood": "calm"}}
    monkeypatch.setattr(chat_tokenizer, "chat_template", chat_tokenizer.chat_template + "{{ mood }}")
    assert held_out(chat_tokenizer, **given)[0].text == "<u>1+2= Think.<a>calm"
    with pytest.raises(UserError, match="reads no option 'mod'"):
        held_out(chat_tokenizer, chat_template=True, chat_template_options={"mod": "calm"})
    with pytest.raises(UserError, match="describes no tools"):
        held_out(chat_tokenizer, chat_template=True, chat_template_options={"tools": []})
    with pytest.raises(UserError, match="sets tokenize") as error:
        held_out(chat_tokenizer, chat_template=True, chat_template_options={"tokenize": True})
    assert error.value.where == "config: data.chat_template_options"


def test_nested_columns(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = [{"task": {"text": "1+1=", "gold": {"value": 2}}}, {"task.text": "2+2=", "task": {"gold": {"value": 4}}}]
    path = write_rows(tmp_path / "a.jsonl", [*rows, {"task": "3+3=", "answer": 6}])
    prompts = stream(tokenizer, path, question_column="task.text", answer_column="task.gold.value", shuffle=False)
    assert [(prompt.text, prompt.answer) for prompt in prompts.next_prompts(2)] == [("1+1=", "2"), ("2+2=", "4")]
    assert [skip[1:3] for skip in prompts.skipped] == [(3, "no 'task.text'")]
    named = {"path": path, "question_column": "task.text", "answer_column": "task.gold.value"}
    assert len(stream(tokenizer, {**named, "path": str(path)})) == 2
