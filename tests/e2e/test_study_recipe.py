"""A study of a recipe by its command, on megatron-core with vLLM and in TRL: both start from one model, on one set.

Not covered: learning.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from oblr_megatron.metrics import read_metrics
from tests.e2e.conftest import LIMIT_S, ROOT, environment
from tests.unit.studies.runs import recipe_plan, write_recipe


@pytest.mark.nightly
def test_both_backends_start_with_the_same_greedy_accuracy_and_finished_runs_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL, the peer, is not installed")
    (plan := tmp_path / "plan.toml").write_text(recipe_plan(write_recipe(tmp_path)))
    command = [sys.executable, "-m", "oblr_megatron.cli", "study", "curves", str(plan), "--out", str(tmp_path / "out")]

    def study() -> str:
        result = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    first, again = study(), study()
    assert "words main: 3 of 3 runs to do" in first and "words main: 0 of 3 runs to do" in again
    places = ("pooled/4x4/lr0.001/seed0/train", "lora/4x4/lr0.001/seed0/train", "trl_grpo/4x4/lr0.001/seed0")
    ours, lora, trl = (read_metrics(tmp_path / "out/words" / place) for place in places)
    assert [record["step"] for record in ours] == [record["step"] for record in trl] == [0, 1, 2]
    assert lora[0]["eval/words/accuracy"] == ours[0]["eval/words/accuracy"]
    assert ours[0]["eval/words/accuracy"] == pytest.approx(trl[0]["eval/words/accuracy"]) != 0
    assert ours[0]["eval/words/mean_at_k"] == pytest.approx(trl[0]["eval/words/mean_at_k"], abs=0.3)
    assert ours[1]["grad_norm"] > 0 < trl[1]["grad_norm"]
    assert "trl_grpo (peer)" in (tmp_path / "out/summary.md").read_text()
