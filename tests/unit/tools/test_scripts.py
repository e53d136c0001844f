"""Every script of tools/ answers `--help`, in this process.

Their shortest runs are in tests/unit/bench/test_commands.py and tests/e2e. Not covered: tools/lock.py and
tools/lock_gpu.py, which need the network; a whole tools/smoke.py, which needs 17 GiB; `run_tests.py`, which runs this.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_OPTIONS = {
    *("config_doc.py", "lock.py", "lock_gpu.py"),
    *("child.py", "raising.py", "rollout_bare.py", "push_reload.py", "step_system.py", "soak_rank.py"),  # of others
}
SCRIPTS = [
    path
    for path in sorted((ROOT / "tools").rglob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8") and path.name not in WITHOUT_OPTIONS
]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=[str(path.relative_to(ROOT / "tools")) for path in SCRIPTS])
def test_help(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert not ended.value.code and "usage: " in capsys.readouterr().out


@pytest.mark.nightly
def test_dry_runs_of_presets(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--presets", "qwen3_0.6b", "--nodes", "2", "--json", str(out)]
    subprocess.run([sys.executable, "tools/dry_run_presets.py", *options], cwd=ROOT, check=True, timeout=600)
    rows = json.loads(out.read_text())["rows"]
    assert [row["preset"] for row in rows] == ["qwen3_0.6b"] * len(rows) and rows[-1]["ranks"] == 16
    assert all(0 < row["share"] < 1 for row in rows)
