"""The benchmark of checkpoints runs, on a layer, and writes what it says.

Not covered: whether its figures are good.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.bench.test_convert_bench import LAYER, ROOT


def test_a_small_run_writes_its_figures(tmp_path: Path) -> None:
    options = ["--layers", "1", "--vocab", "4096", "--rounds", "1", "--dir", str(tmp_path)]
    command = [sys.executable, "tools/bench/checkpoint.py", "--json", str(tmp_path / "out.json"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["copy", "blocked", "save", "load"]
    for row in rows:
        assert 1 <= row["bytes"] / (14 * LAYER) < 1.01, "weights in bf16, masters and two moments in fp32"
        assert abs(row["ratio_to_copy"] * row["seconds"] / rows[0]["seconds"] - 1) < 1e-9  # of one round
    assert rows[1]["seconds"] < rows[2]["seconds"], "the whole of a save holds its first part"
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]
