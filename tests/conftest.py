"""Shared by all tests."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(autouse=True, scope="session")
def hears_sighup() -> None:
    """Undo the `nohup` under which the tests may run; programs that they start inherit this."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
