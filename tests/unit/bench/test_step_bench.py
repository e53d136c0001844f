"""The benchmark of whole steps: its arithmetic, and that all its systems make steps and end.

Not covered: whether its figures are good.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import step
from step_system import Work

from tests.unit.bench.test_convert_bench import ROOT

pytest.importorskip("trl", reason="TRL, what is measured against, is not installed")


def test_ratios_are_to_the_faster_of_trl_in_each_round():
    times = {"oblr_po": [1.0, 2.0, 9.0], "trl_grpo": [2.0, 8.0, 3.0], "trl_rloo": [4.0, 4.0, 4.0]}
    ours, grpo, rloo = step.rows_of(times, Work(directory="", num_prompts=4, group_size=2, num_steps=6, num_threads=1))
    assert (ours.ratio_to_trl, grpo.ratio_to_trl, rloo.ratio_to_trl) == (0.5, 1.0, 4 / 3)
    assert (ours.seconds, ours.fastest, ours.slowest, ours.samples, ours.rounds) == (2.0, 1.0, 9.0, 8, 3)


def test_something_of_trl_must_be_among_the_systems():
    with pytest.raises(SystemExit):
        step.parse_options(["--systems", "oblr_po"])


@pytest.mark.slow
def test_a_small_run_writes_its_figures(tmp_path: Path):
    command = [sys.executable, "tools/bench/step.py", "--quick", "--threads", "1", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["system"] for row in rows] == ["oblr_po", "trl_grpo", "trl_rloo"]
    assert min(row["ratio_to_trl"] for row in rows[1:]) == 1.0, "one round: its faster trainer is the base"
    assert all(row["seconds"] > 0 and row["samples"] == 64 for row in rows)
