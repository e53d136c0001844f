"""A meaningless reward that differs between the responses of a group.

A model with random weights never answers a question. A real reward would always be 0, so would every advantage, and the
smoke run would skip the gradient passes that it must exercise.
"""

from __future__ import annotations

VOWELS = frozenset("aeiouAEIOU")


def share_of_vowels(response: str, answer: str, prompt: str) -> float:
    """Share of vowels in the response, in [0, 1]; answer and prompt are ignored. Example: "banana" -> 0.5."""
    return sum(character in VOWELS for character in response) / max(len(response), 1)
