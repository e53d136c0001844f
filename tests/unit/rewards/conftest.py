"""Prompts and samples from strings, the folder of the benchmark sets, and a pool that waits longer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from oblr_megatron.rewards.workers.pool import Pool
from oblr_megatron.types import Prompt, Sample

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"  # next to the checkout


def batch(rows: Sequence[tuple[str, Sequence[str]]]) -> tuple[list[Prompt], list[Sample]]:
    """[(gold answer, responses)] -> prompts and prompt-major samples. Row q has a column "level", q + 1."""
    prompts = [
        Prompt(q, f"p{q}", f"prompt {q}", (q,), answer, "test", columns=json.dumps({"answer": answer, "level": q + 1}))
        for q, (answer, _) in enumerate(rows)
    ]
    samples = [
        Sample(q, (q,), (1,), (0.0,), text, "stop", 0) for q, (_, responses) in enumerate(rows) for text in responses
    ]
    return prompts, samples


def unhurried(patch: pytest.MonkeyPatch, *hanging: str) -> list[float]:
    """Give every request a minute that holds none of these texts: a stalled machine may make no other call late.

    Returns:
        The limit that the pool sets for each request, in order, in seconds.
    """
    send, limits = Pool._send, []

    def sent(pool: Pool, slot: int, message: bytes) -> SimpleNamespace:
        pipe = send(pool, slot, message).pipe

        def poll(seconds: float) -> bool:
            limits.append(seconds)
            return pipe.poll(seconds if any(text.encode() in message for text in hanging) else max(seconds, 60.0))

        return SimpleNamespace(pipe=SimpleNamespace(poll=poll, recv_bytes=pipe.recv_bytes))

    patch.setattr(Pool, "_send", sent)
    return limits
