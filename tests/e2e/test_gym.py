"""A run on tasks of reasoning-gym: generated rows on two ranks, real engines, scores from the reward's workers.

Not covered: learning. The model is not trained before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from studies.start import prepare
from tests.e2e.conftest import records
from tests.e2e.forked import forked

SUMS = '{path = "reasoning_gym:basic_arithmetic", size = 40, options = {max_terms = 3, allow_parentheses = false}}'
HELD_OUT = '{path = "reasoning_gym:basic_arithmetic", size = 6, options = {max_terms = 3, allow_parentheses = false}}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can read the questions."""
    return prepare("gym_basic_arithmetic", "middle", tmp_path_factory.mktemp("gym"), steps=1) / "model"


def test_a_run_and_its_continuation(model: Path, overrides: Callable[..., list[str]], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keys = {
        "model.path": model,
        "data.train": SUMS,
        "data.max_prompt_tokens": 48,
        "rollout.max_response_tokens": 6,
        "reward.name": "reasoning_gym:whole",
        "evaluate.data": f"{{sums = {HELD_OUT}}}",
        "evaluate.every_steps": 2,
        "checkpoint.every_steps": 1,
        "model.make_vocab_size_divisible_by": 1,
    }
    given = [one for one in overrides(run_dir) if not one.startswith(("evaluate.", *keys))]
    given += [f"{key}={value}" for key, value in keys.items()]
    first = forked(2, [*given, "num_steps=2"])
    assert first.returncode == 0, first.stderr[-3000:]
    again = forked(2, [*given, "num_steps=3", "checkpoint.resume=newest"])
    assert again.returncode == 0, again.stderr[-3000:]
    steps = records(run_dir)
    assert [record["step"] for record in steps if "reward/mean" in record] == [1, 2, 3]
    assert all(record["reward/failures"] == 0 for record in steps if "reward/mean" in record)
    items = [json.loads(line) for line in (run_dir / "evaluations" / "step_000002" / "sums.jsonl").open()]
    assert len({item["prompt"] for item in items}) == 6 and all(item["prompt"][:10] == "Calculate " for item in items)


def test_a_wrong_task_ends_before_the_run(model: Path, overrides: Callable[..., list[str]], tmp_path: Path) -> None:
    keys = [f"model.path={model}", "data.train=reasoning_gym:basic_arithmetics"]
    result = forked(1, [*overrides(tmp_path / "run"), *keys])
    assert result.returncode == 2 and not (tmp_path / "run").exists()
    assert len(result.stderr.strip().splitlines()) == 1 and "basic_arithmetic" in result.stderr
