"""Real training runs on two ranks, killed with SIGKILL and resumed, against a run that is never killed.

Not covered: many kills (python tools/kill_resume.py --kills 50), power loss.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import run

LIMIT_S = 590
pytestmark = [pytest.mark.nightly, pytest.mark.alone]


@pytest.mark.timeout(600)
def test_kills_and_resumes_do_not_change_a_run(tmp_path: Path, tiny: Path) -> None:
    """Metrics and weights are equal bit for bit; checkpoints are intact after every kill; nothing is left behind."""
    report = tmp_path / "kills.json"
    command = [sys.executable, "tools/kill_resume.py", "--kills", "2", "--ranks", "2", "--json", str(report)]
    sizes = ["num_prompts=16", "group_size=4"]
    result = run([*command, "--model", str(tiny / "model"), "--out", str(tmp_path / "runs"), *sizes], LIMIT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(report.read_text())
    assert sum(found["kills"].values()) == 2
    assert [(row["status"], row["starts"]) for row in found["rows"]] == [(0, 1), (0, 3)]
    assert not any(row["problems"] for row in found["rows"])
