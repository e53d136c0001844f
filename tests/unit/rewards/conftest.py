"""Prompts and samples from strings, and the folder of the benchmark sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

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
