"""Waits for what other processes do; a busy machine may take long."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], patience_s: float = 60.0) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, f"the condition did not hold within {patience_s} s"
        time.sleep(0.02)
