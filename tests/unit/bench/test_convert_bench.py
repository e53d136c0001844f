"""The benchmark of conversions runs, on a layer, and writes what it says.

Not covered: whether its figures are good.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LAYER = 4096 * 1024 + 1024 + 2 * 1024 + 2 * 128 + 1024 * 128 * (2 * 16 + 2 * 8) + 3 * 3072 * 1024


def test_a_small_run_writes_its_figures(tmp_path: Path) -> None:
    options = ["--layers", "1", "--vocab", "4096", "--rounds", "1", "--dir", str(tmp_path)]
    command = [sys.executable, "tools/bench/convert.py", "--json", str(tmp_path / "convert.json"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "convert.json").read_text())["rows"]
    assert [row["direction"] for row in rows] == ["copy", "to-megatron", "to-hf"]
    for row in rows:
        assert row["bytes"] == 2 * LAYER and row["seconds"] > 0
        assert abs(row["gb_per_s"] * row["seconds"] * 1e9 / row["bytes"] - 1) < 1e-9
        assert abs(row["ratio_to_copy"] * row["seconds"] / rows[0]["seconds"] - 1) < 1e-9  # of one round
    assert list(tmp_path.iterdir()) == [tmp_path / "convert.json"]
