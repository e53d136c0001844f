"""Prompts: what is read, what is left out, the order of epochs, and resuming.

The oracle of the order is counting: over any number of epochs every usable row has to come exactly that often. Not
covered: the chat templates of real models, and the memory a large set takes.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from oblr_megatron.config import DataConfig
from oblr_megatron.data.prompts import PromptStream, load_prompts
from oblr_megatron.errors import UserError
from tests.unit.data.conftest import DATA

SUMS, BROKEN = DATA / "sums.jsonl", DATA / "broken.jsonl"


def config(path: Path = SUMS, **values: object) -> DataConfig:
    return DataConfig.model_validate({"train": path, **values})


def stream(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, **values: object) -> PromptStream:
    return PromptStream(config(**values), tokenizer, seed=seed)


def test_rows_become_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = load_prompts(SUMS, config(template="Q: {question}\nA:"), tokenizer)
    assert [prompt.answer for prompt in prompts] == ["3", "7", "11", "15", "10", "4", "9"]
    first = prompts[0]
    assert (first.row, first.id, first.source) == (0, "sum-1-2", "sums")
    assert first.text == "Q: 1+2=\nA:"
    assert first.token_ids == tuple(tokenizer(first.text)["input_ids"]) and len(first.token_ids) > 8


def test_a_template_may_hold_other_braces(tokenizer: PreTrainedTokenizerFast) -> None:
    template = "Solve {question} and answer in \\boxed{}."
    assert load_prompts(SUMS, config(template=template), tokenizer)[0].text == "Solve 1+2= and answer in \\boxed{}."


def test_chat_template(chat_tokenizer: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast) -> None:
    plain = load_prompts(SUMS, config(chat_template=True), chat_tokenizer)[0]
    assert plain.text == "<u>1+2=<a>"
    assert plain.token_ids == tuple(tokenizer(plain.text)["input_ids"])
    system = load_prompts(SUMS, config(chat_template=True, system_prompt="Be brief."), chat_tokenizer)[0]
    assert system.text == "<s>Be brief.<u>1+2=<a>"


def test_chat_template_has_to_exist(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="no chat template"):
        load_prompts(SUMS, config(chat_template=True), tokenizer)


def test_unusable_rows_are_named(tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        prompts = stream(tokenizer, path=BROKEN, max_prompt_tokens=20, shuffle=False)
    assert [(skip.line, skip.reason) for skip in prompts.skipped] == [
        (2, "not JSON"),
        (3, "not a JSON object"),
        (4, "no 'answer'"),
        (7, "no 'question'"),
        (8, "no 'answer'"),
        (9, "not UTF-8"),
        (10, "flagged overlaps_benchmark"),
        (11, "40 tokens, data.max_prompt_tokens is 20"),
        (12, "no 'answer'"),
    ]
    [line] = caplog.messages
    assert "skipped 9 rows" in line and "line 2: not JSON" in line and "and 4 more" in line and "\n" not in line
    taken = prompts.take(3)
    assert [(prompt.row, prompt.answer) for prompt in taken] == [(0, "2"), (5, "6"), (12, "14")]
    assert [prompt.id for prompt in taken] == ["broken-0", "numbers-are-answers", "broken-12"]


def test_evaluation_keeps_rows_that_overlap_a_benchmark(tokenizer: PreTrainedTokenizerFast) -> None:
    assert "10" in [prompt.answer for prompt in load_prompts(BROKEN, config(BROKEN), tokenizer)]


def test_limit_keeps_the_first_usable_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [prompt.answer for prompt in load_prompts(BROKEN, config(BROKEN), tokenizer, limit=2)] == ["2", "6"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the data set is empty"),
        ("\n\n", "the data set is empty"),
        ('{"a": 1}\n', r"no usable row \(line 1: no 'qu"),
    ],
)
def test_nothing_usable(content: str, message: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        stream(tokenizer, path=path)
    assert str(path) in str(caught.value)


def test_missing_file(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(UserError, match="cannot read the data set"):
            load_prompts(path, config(path), tokenizer)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 10])
def test_every_epoch_holds_every_prompt_once(batch: int, tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = stream(tokenizer, seed=3)
    taken = [prompt.row for _ in range(21) for prompt in prompts.take(batch)]
    for epoch in range(len(taken) // 7):
        assert sorted(taken[epoch * 7 : epoch * 7 + 7]) == list(range(7)), f"epoch {epoch}"
    assert max(Counter(taken).values()) - min(Counter(taken).values()) <= 1
    assert prompts.epoch == len(taken) // 7


def test_order_is_drawn_from_seed_and_epoch(tokenizer: PreTrainedTokenizerFast) -> None:
    def orders(seed: int) -> list[tuple[int, ...]]:
        prompts = stream(tokenizer, seed=seed)
        return [tuple(prompt.row for prompt in prompts.take(7)) for _ in range(3)]

    assert orders(0) == orders(0)
    assert len({*orders(0), *orders(1)}) == 6
    unshuffled = stream(tokenizer, shuffle=False)
    assert [prompt.row for prompt in unshuffled.take(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


@pytest.mark.parametrize("before", [0, 3, 7, 10, 13, 14])
def test_resume_goes_on_at_the_next_prompt(before: int, tokenizer: PreTrainedTokenizerFast) -> None:
    whole, interrupted, resumed = (stream(tokenizer, seed=5) for _ in range(3))
    expected = whole.take(before + 20)[before:]
    interrupted.take(before)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert resumed.take(20) == expected
    assert resumed.epoch == whole.epoch


def test_resume_refuses_other_data(tokenizer: PreTrainedTokenizerFast) -> None:
    state = stream(tokenizer).state_dict()
    with pytest.raises(UserError, match="another fingerprint"):
        stream(tokenizer, path=BROKEN).load_state_dict(state)
    with pytest.raises(UserError, match="another fingerprint"):
        stream(tokenizer, template="{question} ").load_state_dict(state)
    with pytest.raises(UserError, match="another seed"):
        stream(tokenizer, seed=1).load_state_dict(state)
