"""Sources "reasoning_gym:NAME": which rows they give, and that training and evaluation share none.

The oracle is the package itself. Not covered: rows of the tasks that take more than a second an item.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS
from transformers import PreTrainedTokenizerFast

from oblr_megatron.checks.packages import REASONING_GYM
from oblr_megatron.config import parse_config
from oblr_megatron.config.data import MOST_ROWS, SourceConfig
from oblr_megatron.data.prompt_set import read_prompts
from oblr_megatron.data.prompts import PromptStream
from oblr_megatron.data.sources import kind_of, named_source, open_source
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.extras.gym.reward import NOT_TASKS
from oblr_megatron.extras.gym.rows import NO_GOLD, gym_rows, package_seed, plain, request_of
from oblr_megatron.extras.gym.rows import row as row_of
from tests.unit.data.conftest import config, stream

SMALL = {"max_value": 30}
UNLIKE = ("codeio", "isomorphic_strings", "knights_knaves", "rearc")
"""Tasks that draw from the global generators, depend on the order of sets, or keep numpy's scalars or tuples."""


def gym(name: str = "gcd", **values: Any) -> SourceConfig:
    return SourceConfig.model_validate({"path": f"reasoning_gym:{name}", **values})


def rows(request: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
    """The rows of a request, generated in this process."""
    return (json.loads(row_of(json.dumps(request), str(index))) for index in range(request["size"]))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources generate their rows here, for tests of what happens to the rows."""
    monkeypatch.setattr(
        "oblr_megatron.extras.gym.rows.gym_rows",
        lambda source, *, training: rows(request_of(source, training=training)),
    )


def values(source: SourceConfig, *, training: bool = True) -> list[dict[str, Any]]:
    return rows_of(source.model_dump_json(), training)


@cache
def rows_of(source_json: str, training: bool) -> list[dict[str, Any]]:
    source = SourceConfig.model_validate_json(source_json)
    found = [record.value for record in open_source(source, training=training)]
    assert all(isinstance(value, dict) for value in found), found
    return found  # type: ignore[return-value]


def test_rows_are_the_packages_items() -> None:
    rows = values(gym(size=5, seed=3, options=SMALL))
    task = reasoning_gym.create_dataset("gcd", seed=6 * MOST_ROWS, size=5, **SMALL)
    assert [ast.literal_eval(row["reasoning_gym"]["entry"]) for row in rows] == [task[index] for index in range(5)]
    assert [(row["question"], row["answer"]) for row in rows] == [(one["question"], one["answer"]) for one in task]
    assert rows[0]["reasoning_gym"]["options"] == SMALL


@pytest.mark.usefixtures("in_this_process")
def test_training_and_evaluation_use_different_items_for_any_seeds() -> None:
    """The ranges of package seeds are disjoint and below numpy's limit."""
    starts = [package_seed(gym(seed=seed), training=role) for seed in (0, 1, 2, 1999, 2000) for role in (True, False)]
    assert len(set(starts)) == 10 and all(start % MOST_ROWS == 0 for start in starts)
    assert max(starts) + MOST_ROWS <= 2**32
    source = gym(size=40)
    assert not {row["question"] for row in values(source)} & {row["question"] for row in values(source, training=False)}


def test_a_held_out_set_is_generated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlap check and the evaluation read it. Training rows and huge sets are not kept."""
    asked: list[bool] = []

    def here(source: SourceConfig, *, training: bool) -> Iterator[dict[str, Any] | str]:
        asked.append(training)
        return rows(request_of(source, training=training))

    monkeypatch.setattr("oblr_megatron.extras.gym.rows._generated", here)
    source = gym(size=3, seed=1999)
    assert list(gym_rows(source, training=False)) == list(gym_rows(source, training=False))
    assert asked == [False]
    list(gym_rows(source, training=True)), list(gym_rows(source, training=True))
    assert asked == [False, True, True]
    monkeypatch.setattr("oblr_megatron.extras.gym.rows.KEPT_ROWS", 2)
    list(gym_rows(source, training=False))
    assert len(asked) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_number_of_rows_by_role() -> None:
    assert len(values(gym("coin_flip"))) == 5000
    assert len(values(gym("coin_flip"), training=False)) == 500
    assert list(itertools.islice(open_source(gym("coin_flip"), training=True), 2))[1].number == 1


SCRIPT = """
import json
from oblr_megatron.config.data import SourceConfig
from oblr_megatron.extras.gym.rows import gym_rows
sources = [SourceConfig(path="reasoning_gym:" + name, size=2) for name in {names!r}]
print(json.dumps([list(gym_rows(source, training=True)) for source in sources]))
"""


@pytest.mark.slow
def test_rows_are_the_same_in_every_process() -> None:
    """Whatever the order of sets is in the process that asks."""
    found = []
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-c", SCRIPT.format(names=UNLIKE)]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        found.append(json.loads(done.stdout))
    assert found[0] == found[1] and [len(rows) for rows in found[0]] == [2] * len(UNLIKE)
    assert all(row["question"] and row["answer"] for rows in found[0] for row in rows)


@pytest.mark.usefixtures("in_this_process")
def test_entries_survive_as_python_writes_them() -> None:
    import numpy as np

    entry = {"answer": None, 3: (1, [np.str_("a"), np.int64(2)], {"x": np.float64(0.5)}), "kind": ValueError}
    assert plain(entry) == {"answer": None, 3: (1, ["a", 2], {"x": 0.5}), "kind": str(ValueError)}
    assert ast.literal_eval(repr(plain(entry))) == plain(entry)
    assert {row["answer"] for row in values(gym("graph_color", size=2))} == {NO_GOLD}


def test_an_item_that_cannot_be_generated_is_skipped(tokenizer: PreTrainedTokenizerFast) -> None:
    """The task accepts words of 299 letters, but its list has none."""
    data = config({"path": "reasoning_gym:spell_backward", "options": {"min_word_len": 299, "max_word_len": 300}})
    with pytest.raises(UserError) as caught:
        read_prompts(data.train[0], data, tokenizer)
    assert "500 cannot be generated" in caught.value.what and "options" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "options", "fix"),
    [
        ("gdc", {}, "gcd"),
        ("arithmetic", {}, "basic_arithmetic"),
        ("zzz", {}, "chain_sum"),
        *((name, {}, "gcd") for name in NOT_TASKS),
        ("gcd", {"max": 3}, "max_value"),
        ("gcd", {"seed": 3}, "max_value"),
        ("gcd", {"max_value": 0}, "max_value = 1000"),
        ("gcd", {"max_value": "many"}, "max_value = 1000"),
    ],
)
def test_wrong_names_and_options_are_refused_with_the_right_ones(name: str, options: dict[str, Any], fix: str) -> None:
    with pytest.raises(UserError) as caught:
        kind_of(gym(name, options=options))
    assert caught.value.where == f"reasoning_gym:{name}" and fix in caught.value.fix
    assert "\n" not in str(caught.value)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oblr_megatron.checks.packages.installed_version", lambda distribution: None)
    with pytest.raises(UserError) as caught:
        kind_of(gym())
    assert caught.value.where == "reasoning_gym:gcd" and "[gym]" in caught.value.fix
    monkeypatch.setattr("oblr_megatron.checks.packages.installed_version", lambda distribution: "0.2.0")
    with pytest.raises(UserError) as caught:
        kind_of(gym())
    assert "0.2.0" in caught.value.what and REASONING_GYM.accepted in caught.value.what


@pytest.mark.parametrize(
    "source",
    [
        {"path": "reasoning_gym:gcd", "split": "test"},
        {"path": "reasoning_gym:gcd", "question_column": "q"},
        {"path": "reasoning_gym:gcd", "convention": "gsm8k"},
        {"path": "rows.jsonl", "seed": 3},
        {"path": "rows.jsonl", "size": 3},
        {"path": "rows.jsonl", "options": {"max_value": 3}},
        {"path": "reasoning_gym:"},
        {"path": "reasoning_gym:gcd", "size": MOST_ROWS + 1},
        {"path": "reasoning_gym:gcd", "seed": 2001},
    ],
)
def test_keys_of_the_other_kind_of_source_are_refused(source: dict[str, Any]) -> None:
    table = {"run_dir": "run", "model": {"path": "model"}, "data": {"train": source}}
    with pytest.raises(UserError) as caught:
        parse_config(table)
    assert caught.value.where == "config"


def test_names_on_a_command_line() -> None:
    assert named_source("reasoning_gym:gcd") == ("gcd", gym())
    assert named_source("hard=reasoning_gym:gcd") == ("hard", gym())
    assert named_source("gsm8k=reasoning_gym:gcd") == ("gsm8k", gym())


BASES = {"path": "reasoning_gym:base_conversion", "options": {"max_base": 4, "min_value": 1, "max_value": 40}}
"""240 questions, each with the same 28 words before its numbers."""


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_no_question_of_a_generated_benchmark_stays_in_training(tokenizer: PreTrainedTokenizerFast) -> None:
    """And the others do, though they share most of their shingles."""
    held_out = SourceConfig.model_validate({**BASES, "size": 100})
    data = config({**BASES, "size": 600})
    prompts = PromptStream(data, tokenizer, seed=0, held_out={"bases": held_out})
    trained = {prompt.text for prompt in prompts.next_prompts(len(prompts))}
    tested = {row["question"] for row in values(held_out, training=False)}
    assert trained == {row["question"] for row in values(data.train[0])} - tested
    assert len(trained) > 50 and {skip.reason for skip in prompts.skipped} == {"overlapping bases", "duplicate"}


@pytest.mark.usefixtures("in_this_process")
def test_other_benchmarks_are_compared_by_their_shingles(tokenizer: PreTrainedTokenizerFast, tmp_path: Any) -> None:
    row = values(SourceConfig.model_validate({**BASES, "size": 600}))[0]
    (tmp_path / "held.jsonl").write_text(json.dumps({"question": row["question"], "answer": "1"}))
    with pytest.raises(UserError, match="overlapping"):
        stream(tokenizer, {**BASES, "size": 600}, exclude=[str(tmp_path / "held.jsonl")])


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_a_mixture_resumes_where_it_was(tokenizer: PreTrainedTokenizerFast) -> None:
    sources = [
        {"path": "reasoning_gym:gcd", "size": 30, "weight": 3},
        {"path": "reasoning_gym:chain_sum", "size": 30, "weight": 1},
    ]
    first = stream(tokenizer, sources)
    head = first.next_prompts(8)
    assert [prompt.source for prompt in head].count("chain_sum") == 2 and head[0].id.startswith("gcd-")
    state = json.loads(json.dumps(first.state_dict()))
    again = stream(tokenizer, sources)
    again.load_state_dict(state)
    assert again.next_prompts(8) == first.next_prompts(8)
    other = stream(tokenizer, [{**sources[0], "seed": 1}, sources[1]])
    with pytest.raises(UserError, match="fingerprint"):
        other.load_state_dict(state)


def test_a_worker_reports_its_own_failure_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oblr_megatron.extras.gym.rows.request_of", lambda source, *, training: {"size": 1})
    with pytest.raises(RunError) as caught:
        values(gym(size=1, seed=7))
    assert "reasoning_gym:gcd" in str(caught.value) and "KeyError" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_item_without_a_solution_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oblr_megatron.extras.gym.rows.ROW_S", 1.0)
    with pytest.raises(UserError) as caught:
        values(gym("puzzle24", size=1, options={"max_value": 1}))
    assert "more than 1 s for an item" in caught.value.what and caught.value.fix


@pytest.mark.slow
def test_gold_answers_of_every_fast_task_score_one() -> None:
    """Also after the entry was written and read. Tasks without a gold answer are left out."""
    from oblr_megatron.extras.gym.reward import score

    slow = {"knight_swap", "intermediate_integration", "futoshiki", "sokoban", "zebra_puzzles"}
    checked = 0
    for name in sorted(DATASETS.keys() - set(NOT_TASKS) - slow):
        for row in rows({"name": name, "options": {}, "seed": 7, "size": 2, "where": ""}):
            assert isinstance(row, dict), (name, row)
            if row["answer"] != NO_GOLD:
                assert score(row["answer"], row) == 1.0, name
                checked += 1
            assert 0.0 <= score("no idea", row) <= 1.0, name
    assert checked > 180
