"""The Makefile: where an environment is made, and what `make clean` leaves. Not covered: the builds themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(directory: Path, *arguments: str) -> str:
    """What make says, whatever the make that started this test was told."""
    told = ("VENV", "GPU_VENV", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in told}
    command = ["make", "-C", str(directory), "GPU_PYTHON=python3", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.parametrize(("given", "built"), [("/scratch/me/venv", "/scratch/me/venv"), ("own", "{clone}/own")])
def test_transformer_engine_is_built_for_the_environment_that_was_named(given: str, built: str, tmp_path: Path) -> None:
    """The path of the clone may have spaces."""
    clone = tmp_path / "my code"
    shutil.copytree(ROOT / "requirements", clone / "requirements")
    for name in ("Makefile", "setup.py"):
        shutil.copy(ROOT / name, clone)
    said = make(clone, "--dry-run", "gpu-env", f"GPU_VENV={given}")
    assert f'requirements/build_te.sh "{built.format(clone=clone)}/bin/python"\n' in said


def test_clean_removes_what_can_be_made_again_and_no_run(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    sources = ["oblr_megatron", "studies", "tests", "tools", "examples"]
    made = [".venv", ".venv-gpu", ".venv-oldest", "build", ".pytest_cache", "tests/unit/__pycache__"]
    for name in [*sources, *made, "run/checkpoints"]:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    make(tmp_path, "clean")
    assert not [name for name in made if (tmp_path / name).exists()]
    assert all((tmp_path / name).is_dir() for name in [*sources, "run/checkpoints"])
