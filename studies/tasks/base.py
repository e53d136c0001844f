"""What a task is: questions with gold answers, a reward, and a teacher of chosen skill for the warm start."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Skill = Literal["low", "middle", "high"]
SPLIT_SEED = 20251123  # one split for all seeds of a study: runs differ in sampling, not in what they are asked


@dataclass(frozen=True, slots=True)
class Row:
    """One question. Example: Row(question="23+58=", answer="18")."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """A generated task; every character is a token, and an end token closes a response."""

    name: str
    module: str  # where `reward` is found by name
    characters: str
    max_response_tokens: int  # the end token included
    skills: dict[Skill, float]  # share of right answers that the teacher of each level gives
    draw: Callable[[random.Random], Row]
    reward: Callable[[str, str], float]  # (response, answer) -> 0..1, 1 for right
    teach: Callable[[Row, random.Random, float], str]  # an answer that is right with this probability, roughly

    def rows(self, num_train: int = 4096, num_held_out: int = 256) -> tuple[list[Row], list[Row]]:
        """(train, held out): distinct questions, no question in both, the same in every call."""
        generator = random.Random(SPLIT_SEED)
        found: dict[str, Row] = {}
        while len(found) < num_train + num_held_out:
            row = self.draw(generator)
            found.setdefault(row.question, row)
        rows = list(found.values())
        generator.shuffle(rows)
        return rows[num_held_out:], rows[:num_held_out]
