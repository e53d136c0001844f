"""Trackers without a network, and proof that none of their processes is left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every tracker local: wandb offline, mlflow and trackio in this directory. No process may be left behind."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield tmp_path
    end = time.monotonic() + 20
    while left := [one for one in Path("/proc").glob("[0-9]*") if f"HOME={tmp_path}\0" in environment_of(one)]:
        assert time.monotonic() < end, [(one / "cmdline").read_text() for one in left]
        time.sleep(0.1)


def environment_of(process: Path) -> str:
    """The variables that a process was started with; empty for a zombie."""
    try:
        return (process / "environ").read_text(errors="replace")
    except OSError:
        return ""
