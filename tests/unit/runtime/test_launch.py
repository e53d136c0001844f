"""The launcher's log. tests/e2e/test_launch.py starts launchers."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from oblr_megatron.runtime.launch import _Log


class Joins:
    """As torchrun's keep-alive timer, when its own thread is the last to hold it."""

    def __del__(self) -> None:
        raise RuntimeError("cannot join current thread")


def test_what_python_cannot_raise_is_in_the_log_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root.manager, "loggerDict", {})
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    log = _Log(tmp_path)
    Joins()
    assert capfd.readouterr().err == ""
    log.keep("a rank failed")
    assert "cannot join current thread" in (tmp_path / "logs" / "launcher.log").read_text()
