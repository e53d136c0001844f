"""User reward functions of the end-to-end tests."""

from __future__ import annotations

import os
from pathlib import Path


def matching_characters(response: str, answer: str, prompt: str) -> float:
    """Share of positions where response and answer agree; varies even among responses of an untrained model."""
    assert prompt.endswith("="), f"not a sum: {prompt!r}"
    return sum(a == b for a, b in zip(response, answer, strict=False)) / max(len(response), len(answer))


def always_raises(response: str, answer: str, prompt: str) -> float:
    """A reward with a bug."""
    raise ZeroDivisionError(f"the reward has a bug, seen at {response!r}")


def works_for_one_step(response: str, answer: str, prompt: str, row: dict[str, str]) -> float:
    """Takes the row's columns. Works for 32 calls, which the file named by CALLS counts, then always raises."""
    with open(os.environ["CALLS"], "ab") as calls:
        calls.write(b".")
    if Path(os.environ["CALLS"]).stat().st_size > 32:
        raise ZeroDivisionError("the reward has stopped working")
    assert (row["question"], row["answer"], row["source"]) == (prompt, answer, "two-digit-sums")
    return 0.5 + len(response) / 100


def right_length(response: str, answer: str, prompt: str) -> float:
    """1 if the response is as long as the answer, else 0."""
    return float(len(response) == len(answer))
