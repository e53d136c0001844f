"""examples/norms_library runs as written on two ranks and agrees with the real Opacus."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = "examples/norms_library/norms.py"


@pytest.mark.nightly
def test_the_example_agrees_with_opacus() -> None:
    text = (ROOT / SCRIPT).read_text(encoding="utf-8")
    command = f"--nproc-per-node 2 {SCRIPT}"
    assert f"torchrun {command}" in text and f"torchrun {command}" in (ROOT / "docs/norms_library.md").read_text(
        "utf-8"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split()]
    done = subprocess.run(launcher, check=False, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.fullmatch(r"norms differ from Opacus by (\S+), clipped sums by (\S+)\n", done.stdout)
    assert found and all(float(error) < 1e-12 for error in found.groups()), done.stdout
