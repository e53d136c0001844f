"""User reward functions of the end-to-end tests."""

from __future__ import annotations


def matching_characters(response: str, answer: str, prompt: str) -> float:
    """Share of positions where response and answer agree; varies even among responses of an untrained model."""
    assert prompt.endswith("="), f"not a sum: {prompt!r}"
    return sum(a == b for a, b in zip(response, answer, strict=False)) / max(len(response), len(answer))


def always_raises(response: str, answer: str, prompt: str) -> float:
    """A reward with a bug."""
    raise ZeroDivisionError(f"the reward has a bug, seen at {response!r}")


def right_length(response: str, answer: str, prompt: str) -> float:
    """1 if the response is as long as the answer, else 0."""
    return float(len(response) == len(answer))
