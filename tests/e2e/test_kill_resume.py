"""Real training runs on two ranks, killed with SIGKILL at a few moments and resumed, against one that was left alone.

Not covered: many kills (python tools/kill_resume.py --kills 50), a machine that loses power.
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
def test_a_run_that_is_killed_and_resumed_ends_as_one_left_alone(tmp_path: Path, tiny: Path) -> None:
    """Same metrics and weights to the last bit, every checkpoint whole after every kill, nothing left behind."""
    report = tmp_path / "kills.json"
    command = [sys.executable, "tools/kill_resume.py", "--kills", "2", "--ranks", "2", "--json", str(report)]
    sizes = ["num_prompts=16", "group_size=4"]
    result = run([*command, "--model", str(tiny / "model"), "--out", str(tmp_path / "runs"), *sizes], LIMIT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(report.read_text())
    assert sum(found["kills"].values()) == 2
    assert [(row["status"], row["starts"]) for row in found["rows"]] == [(0, 1), (0, 3)]
    assert not any(row["problems"] for row in found["rows"])
