"""The verifier's benchmark runs, on a few questions, and writes what it says.

Not covered: whether its figures are good.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
QUESTIONS = [("18", "9 + 9 = <<9+9=18>>18"), (r"\frac{\sqrt{3}}{2}", "cos 30")] * 3


def test_a_small_run_writes_its_figures(tmp_path: Path) -> None:
    lines = [json.dumps({"answer": answer, "solution": solution}) for answer, solution in QUESTIONS]
    for name in ("gsm8k_test", "olympiadbench"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = ["--rounds", "1", "--data", str(tmp_path), "--json", str(tmp_path / "verifier.json")]
    command = [sys.executable, "tools/bench/verifier.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "verifier.json").read_text())["rows"]
    kinds = [f"{kind}-like{part}" for kind in ("GSM8K", "OlympiadBench") for part in ("", ", algebra")]
    assert [(row["answers"], row["judge"]) for row in rows] == [(k, j) for k in kinds for j in ("math", "math-verify")]
    assert [row["count"] for row in rows if not row["answers"].endswith("algebra")] == [len(QUESTIONS) * 8] * 4
    for row in rows:
        assert 0 < row["median_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert row["per_s"] > 0 and 0 <= row["right"] <= 1
