"""The soak with one kill per phase: real training runs on two ranks, with engines killed by SIGKILL.

Not covered: many kills at many moments (python tools/soak.py --kills 30), deaths of ranks (test_train.py).
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
def test_engine_kills_in_every_phase_do_not_change_a_run(tmp_path: Path, tiny: Path) -> None:
    """Metrics are equal bit for bit with one restart per kill; without restarts status 1; nothing is left behind."""
    report = tmp_path / "soak.json"
    command = [sys.executable, "tools/soak.py", "--kills", "3", "--ranks", "2", "--json", str(report)]
    sizes = ["num_prompts=16", "group_size=4"]
    result = run([*command, "--model", str(tiny / "model"), "--out", str(tmp_path / "runs"), *sizes], LIMIT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(report.read_text())
    assert set(found["kills"]) == {"rollout", "push", "idle"} and sum(found["kills"].values()) == 4
    assert [(row["status"], row["restarts"]) for row in found["rows"]] == [(0, 0), (0, 3), (1, 0)]
    assert not any(row["problems"] for row in found["rows"])
