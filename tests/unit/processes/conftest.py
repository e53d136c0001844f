"""A pool that waits longer, and an interrupt."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from oblr_megatron.processes.pool import Pool


@contextmanager
def interrupted(seconds: float = 0.3) -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread of the block after so long."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def unhurried(patch: pytest.MonkeyPatch, *hanging: str) -> list[float]:
    """Give every request a minute that holds none of these texts: a stalled machine may make no other call late.

    Returns:
        The limit that the pool sets for each request, in order, in seconds.
    """
    send, limits = Pool._send, []

    def sent(pool: Pool, place: Any, message: bytes) -> SimpleNamespace:
        pipe = send(pool, place, message)

        def poll(seconds: float) -> bool:
            limits.append(seconds)
            return pipe.poll(seconds if any(text.encode() in message for text in hanging) else max(seconds, 60.0))

        return SimpleNamespace(poll=poll, recv_bytes=pipe.recv_bytes)

    patch.setattr(Pool, "_send", sent)
    return limits
