"""A reward of the tests' own, named on the command line as a user names theirs."""

from __future__ import annotations


def matching_characters(response: str, answer: str, prompt: str) -> float:
    """Share of positions at which the response agrees with the answer: even a beginner's responses differ in it."""
    assert prompt.endswith("="), f"not a sum: {prompt!r}"
    return sum(a == b for a, b in zip(response, answer, strict=False)) / max(len(response), len(answer))


def always_raises(response: str, answer: str, prompt: str) -> float:
    """A reward with a bug in it."""
    raise ZeroDivisionError(f"the reward has a bug, seen at {response!r}")


def right_length(response: str, answer: str, prompt: str) -> float:
    """Whether the response is as long as the answer, whatever it says."""
    return float(len(response) == len(answer))
