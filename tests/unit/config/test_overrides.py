"""Overrides from the command line: what they may look like, what is blamed on them, and that none ends in a traceback.

Not covered: values that the checks with torch refuse (tests/e2e/test_bad_input.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.checks.layout import check_layout
from oblr_megatron.checks.lengths import check_positions
from oblr_megatron.checks.run_dir import check_run_dir
from oblr_megatron.config import load_config, parse_config
from oblr_megatron.config.run import LONGEST_SHOWN
from oblr_megatron.data.sources import kind_of
from oblr_megatron.errors import UserError
from oblr_megatron.model.published import published
from oblr_megatron.rewards.registry import REWARDS, check_reward
from tests.unit.config.test_config import COMMAND_LINE, HERE, MINIMAL, keys, refused

BAD_FILE = {**MINIMAL, "num_steps": "abc", "optimizer": {"lr": -1}}
HUGE = f"0x{'f' * 6000}"  # Python writes no decimal integer of this length


@pytest.mark.parametrize(
    ("overrides", "table", "where"),
    [
        (["seed=1"], BAD_FILE, HERE),
        (["num_steps=5"], BAD_FILE, HERE),
        (["seed=1"], {**MINIMAL, "algo": {"baselin": "rloo"}}, HERE),
        (["seed=1"], {**MINIMAL, "run_dir": 5}, HERE),
        (["num_prompts=6"], MINIMAL, COMMAND_LINE),  # not a multiple of algo.snr.num_folds
        (["algo.snr.num_folds=3"], MINIMAL, COMMAND_LINE),
        (["seed=1"], {**MINIMAL, "num_prompts": 6}, HERE),
        (["algo.baseline=rloo"], {**MINIMAL, "group_size": 1}, COMMAND_LINE),
    ],
)
def test_where_a_wrong_value_came_from(overrides: list[str], table: dict[str, Any], where: str) -> None:
    """One wrong value on the command line: test_bad_values."""
    assert refused(overrides, table).where == where


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rollout.servers=[http://a:1]", '["a", "b"]'),
        ('rollout.servers=["http://a:1", ""]', "a URL is empty"),
        ("data.train=[a.jsonl, b.jsonl]", '["a", "b"]'),
        ("run_dir=20261125", "in quotes"),
        ("run_dir=20261125", 'write run_dir = "20261125" in a file, run_dir=\'"20261125"\' in a shell'),
        ("reward.name=2026-01-01", "reward.name='\"2026-01-01\"'"),
        ("seed=0x8000000000000000", "2^63"),
        ("seed=2147483648", "2147483648"),  # vLLM adds to it, and takes 32 bits
        (f"seed={HUGE}", "2^63"),
        (f"optimizer.lr={HUGE}", "2^63"),
        (f"log.samples={HUGE}", "log.samples = "),
        ("optimizer.lr=1e60", "less than or equal to 1000000"),
        (f"num_steps={'9' * 6000}", "without quotes"),
        ("optimizer.lr=.001", "write 0.001"),
        ("num_steps=none", "give a number"),
        ("a..b=1", "section.key=value"),
        ("algo.preset=[1]", "algo.preset"),
    ],
)
def test_what_an_error_says(override: str, named: str) -> None:
    error = refused([override])
    assert named in str(error) and error.where == COMMAND_LINE and len(str(error)) < LONGEST_SHOWN + 200


def test_none_unsets_a_number_of_the_file() -> None:
    table = MINIMAL | {"rollout": {"num_engines": 2}, "algo": {"clip_dual": 3.0, "updates_per_batch": 2}}
    found = parse_config(table, overrides=["rollout.num_engines=none", "algo.clip_dual=none", "algo.baseline=rloo"])
    assert found.rollout.num_engines is None and found.algo.clip_dual is None


def test_a_list_of_one_needs_no_brackets() -> None:
    one = parse_config(MINIMAL, overrides=["rollout.servers=http://a:1", "parallel.recompute_modules=mlp"])
    assert one.rollout.servers == ("http://a:1",) and one.parallel.recompute_modules == ("mlp",)


def test_a_second_line_of_an_override_is_part_of_its_value() -> None:
    assert parse_config(MINIMAL, overrides=["data.template={question}\nseed = 7"]).seed == 0


def test_a_recipe_does_not_hide_a_wrong_section() -> None:
    assert "algo.snr" in str(refused(["algo.preset=grpo", "algo.snr=5"]))


def test_the_config_of_a_run_is_read_again(tmp_path: Path) -> None:
    config = parse_config(MINIMAL, overrides=["seed=3", "evaluate.data.gsm8k=a.jsonl"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.model_dump(mode="json")))
    assert load_config(file) == config and load_config(file, ["seed=4"]).seed == 4


KEYS = keys()
SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS} - {""})
names = st.one_of(
    st.sampled_from(KEYS),
    st.sampled_from(SECTIONS),
    st.tuples(st.sampled_from(KEYS), st.text(max_size=5)).map(".".join),
    st.text(max_size=20),
)
ODD = [
    *("", " ", "true", "0", "-1", "1.5", "nan", "inf", "1e999", "2026-01-01", "12:30:00", HUGE, "9" * 5000),
    *("[]", "{}", "[[]]", "[" * 3000, '["a", 1]', "{path = 1}", "[{path = 'a'}]", "[{name = 'math'}]", "[{}]"),
    *("a" * 5000, "/" * 5000, '"\\u0000"', "\\", "'\\ud800'"),
    *("../..", "~", "*", "**", "[ab]*", "newest", "gsm8k", "a/b"),
    *("no:such", "os:system", ":", "http://", "http://[", "eval/a/accuracy", *REWARDS),
]
plain = st.one_of(st.text(max_size=60), st.integers().map(str), st.floats().map(str), st.sampled_from(ODD))
values = st.one_of(plain, plain.map(json.dumps), st.lists(plain, max_size=3).map(json.dumps))
overrides = st.lists(st.tuples(names, values).map("=".join) | st.text(max_size=20), min_size=1, max_size=4)


def check(given_overrides: list[str]) -> None:
    """Take or refuse them, as the config's own checks and those that follow without torch do."""
    try:
        config = parse_config(MINIMAL, HERE, given_overrides)
        json.dumps(config.model_dump(mode="json"))
        check_run_dir(config.run_dir)
        check_layout(published("0.6B"), config, 1)
        check_positions(config, published("0.6B"))
        for source in (*config.data.train, *config.data.exclude, *config.evaluate.data.values()):
            kind_of(source)
        check_reward(config.reward, max_response_tokens=config.rollout.max_response_tokens)
        check_hf_dir(config.model.path)
    except UserError as error:
        assert "\n" not in str(error)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(overrides)
def test_any_override_is_taken_or_refused(given_overrides: list[str]) -> None:
    check(given_overrides)


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_every_key_takes_or_refuses_odd_values(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for key in [*KEYS, *SECTIONS]:
        check([f"{key}={value}"])
    assert not list(tmp_path.iterdir())
