"""SET.jsonl: its lines, and write errors."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oblr_megatron.evaluation.items import Item, RunItems, items_path

ITEM = Item("s", "id-0", 0, "2+3?", "5", "greedy", 0, "\\boxed{5}", 1.0, 1.1, 4, "stop", answer="5")


def block(kind: str, first: int, last: int) -> list[Item]:
    return [replace(ITEM, id=f"id-{number}", row=number, kind=kind) for number in range(first, last)]  # type: ignore[arg-type]


BLOCKS = [block("greedy", 0, 2), block("greedy", 2, 3), block("sampled", 0, 3)]


@given(st.text(), st.text(), st.none() | st.text(), st.booleans(), st.booleans())
def test_items_round_trip_through_lines(
    prompt: str, response: str, answer: str | None, reads: bool, scored: bool
) -> None:
    item = replace(ITEM, prompt=prompt, response=response, answer=answer if reads else None, reads_answers=reads)
    item = replace(item, scored=scored)
    assert item.line().count(b"\n") == 1
    fields = json.loads(item.line())
    assert Item(**fields, reads_answers="answer" in fields) == item


def test_half_a_surrogate_pair_is_written_as_strict_json() -> None:
    item = replace(ITEM, prompt="\ud800")
    assert json.loads(item.line().decode("utf-8", "strict"))["prompt"] == "\ud800"


def test_a_line_has_no_answer_if_the_reward_extracts_none() -> None:
    assert "answer" not in json.loads(replace(ITEM, answer=None, reads_answers=False).line())
    assert json.loads(replace(ITEM, answer=None).line())["answer"] is None


def test_only_the_line_of_an_unscored_response_says_so() -> None:
    assert "scored" not in json.loads(ITEM.line())
    assert json.loads(replace(ITEM, scored=False).line())["scored"] is False


def test_a_set_with_a_slash_has_a_file() -> None:
    assert items_path(Path("out"), "set/one") == Path("out") / "set__one.jsonl"


def test_a_resumed_run_replaces_the_file_of_a_repeated_step(tmp_path: Path) -> None:
    for _ in range(2):  # the second pass is a run resumed from before the step
        sink = RunItems(tmp_path / "evaluations").sink(20, "s")
        for first, items in zip((0, 2, 3), BLOCKS, strict=True):
            sink(first, items)
    path = tmp_path / "evaluations" / "step_000020" / "s.jsonl"
    assert path.read_bytes() == b"".join(item.line() for items in BLOCKS for item in items)


def test_a_write_error_logs_one_warning_and_the_run_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "evaluations").write_text("a file")
    items = RunItems(tmp_path / "evaluations")
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            sink = items.sink(step, "s")
            sink(0, BLOCKS[0])
            sink(2, BLOCKS[1])
    assert len(caplog.records) == 1 and "evaluations" in caplog.text


def test_without_a_directory_nothing_is_saved(tmp_path: Path) -> None:
    RunItems(None).sink(1, "s")(0, BLOCKS[0])
    assert not list(tmp_path.iterdir())
