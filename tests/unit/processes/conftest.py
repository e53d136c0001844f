"""A pool that waits longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from oblr_megatron.processes.pool import Pool


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
