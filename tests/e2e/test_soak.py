"""The soak with one kill in each phase: real training runs on two ranks, their engine killed with SIGKILL.

Not covered: many kills at many moments (python tools/soak.py --kills 30), deaths of ranks (test_train.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import run

LIMIT_S = 590


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_run_whose_engine_is_killed_in_every_phase_is_as_one_left_alone(tmp_path: Path, tiny: Path) -> None:
    """Same metrics to the last bit and a restart for each kill; without restarts status 1; nothing left behind."""
    report = tmp_path / "soak.json"
    command = [sys.executable, "tools/soak.py", "--kills", "3", "--ranks", "2", "--json", str(report)]
    sizes = ["num_prompts=16", "group_size=4"]
    result = run([*command, "--model", str(tiny / "model"), "--out", str(tmp_path / "runs"), *sizes], LIMIT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(report.read_text())
    assert set(found["kills"]) == {"rollout", "push", "idle"} and sum(found["kills"].values()) == 4
    assert [(row["status"], row["restarts"]) for row in found["rows"]] == [(0, 0), (0, 3), (1, 0)]
    assert not any(row["problems"] for row in found["rows"])
