"""Where a run with `rollout.only` continues.

Not covered: such a run as a whole, stopped and resumed (tests/e2e/test_replay.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oblr_megatron.checks.run_dir import ROLLOUTS
from oblr_megatron.config import Config, parse_config
from oblr_megatron.errors import UserError
from oblr_megatron.preflight.inputs import find_saved
from oblr_megatron.rollout.resume_sampling import find
from oblr_megatron.rollout.step_file import step_path, write_step
from tests.unit.rollout.test_replay import config_of, saved_step

MODEL: Any = SimpleNamespace(fingerprint="0f3c")


def config_in(run_dir: Path, *overrides: str) -> Config:
    table = config_of(run_dir).model_dump(mode="json", exclude_unset=True)
    del table["rollout"]["replay"]
    own = ("rollout.only=true", f"run_dir={run_dir}", "checkpoint.resume=newest")
    return parse_config(table, overrides=[*own, *overrides])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has saved three steps and logged two."""
    run_dir = tmp_path / "run"
    for step in (1, 2, 3):
        write_step(run_dir / ROLLOUTS, saved_step(step, model="0f3c", position={"epoch": 0, "index": 2 * step}))
    lines = [json.dumps({"step": step, "reward/mean": 0.5}) for step in (1, 2)]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run_dir / "config.json").write_text(json.dumps(config_in(run_dir).model_dump(mode="json")))
    return run_dir


def test_it_continues_after_the_last_step_that_is_saved_and_logged(run_dir: Path) -> None:
    found = find(config_in(run_dir), MODEL)
    assert [(one.path, one.step, one.state["data"]) for one in found] == [
        (step_path(run_dir / ROLLOUTS, 2), 2, {"epoch": 0, "index": 4})
    ]
    assert found[0].state["config"]["group_size"] == 2
    assert find(config_in(run_dir, "checkpoint.resume=none"), MODEL) == []
    assert [one.step for one in find_saved(config_in(run_dir), MODEL)] == [2]  # preflight and dry run ask this


def test_a_directory_without_steps_starts_at_the_first(tmp_path: Path, run_dir: Path) -> None:
    assert find(config_in(tmp_path / "new"), MODEL) == []
    (run_dir / "metrics.jsonl").unlink()
    assert find(config_in(run_dir), MODEL) == []


def test_a_damaged_step_is_sampled_again(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    step_path(run_dir / ROLLOUTS, 2).write_bytes(b"PAR1")
    assert [one.step for one in find(config_in(run_dir), MODEL)] == [1]
    assert "step 2 is sampled again" in caplog.text
    step_path(run_dir / ROLLOUTS, 1).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        find(config_in(run_dir), MODEL)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["num_prompts=4"], "num_prompts 2, but the run has 4"),
        (["group_size=4"], "group_size 2, but the run has 4"),
        (["data.shuffle=false"], "data.shuffle true, but the config has false"),
        (["rollout.temperature=0.5"], r"rollout.temperature 1.0, but the run has 0.5"),
        (["rollout.top_k=8"], r"saved with no filter, but the run has top_k 8"),
        (["checkpoint.resume=other/checkpoints/step_00000002"], "has no checkpoints.*convert to-hf"),
    ],
)
def test_other_settings_are_refused(run_dir: Path, overrides: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        find(config_in(run_dir, *overrides), MODEL)


def test_other_models_and_runs_are_refused(run_dir: Path) -> None:
    with pytest.raises(UserError, match="another model"):
        find(config_in(run_dir), SimpleNamespace(fingerprint="77aa"))  # type: ignore[arg-type]
    (run_dir / "config.json").write_text(json.dumps(config_in(run_dir, "rollout.only=false").model_dump(mode="json")))
    with pytest.raises(UserError, match="a run that trains"):
        find(config_in(run_dir), MODEL)
    (run_dir / "config.json").write_text("{}")
    with pytest.raises(UserError, match="configuration cannot be read"):
        find(config_in(run_dir), MODEL)
