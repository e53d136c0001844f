"""A reward that means nothing and only makes the responses of a group differ.

A model with random weights never answers a question, so a real reward would be 0 everywhere, every advantage 0, and the
gradient passes that the smoke run is there to exercise would be skipped.
"""

from __future__ import annotations

VOWELS = frozenset("aeiouAEIOU")


def share_of_vowels(response: str, answer: str, prompt: str) -> float:
    """Vowels over characters of the response, in [0, 1]; answer and prompt play no part. Example: "banana" -> 0.5."""
    return sum(character in VOWELS for character in response) / max(len(response), 1)
