"""The Task record: questions with gold answers, a reward, and a teacher of chosen skill for the warm start."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Skill = Literal["low", "middle", "high"]
SPLIT_SEED = 20251123  # the same split for every seed of a study: runs differ in sampling, not in their questions


@dataclass(frozen=True, slots=True)
class Row:
    """One question. Example: Row(question="23+58=", answer="18")."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """A generated task. Every character is one token; an end token closes a response."""

    name: str
    module: str  # module that defines `reward`
    characters: str
    max_response_tokens: int  # including the end token
    skills: dict[Skill, float]  # skill -> share of right answers that the teacher gives
    draw: Callable[[random.Random], Row]
    reward: Callable[[str, str], float]  # (response, answer) -> 0..1; 1 is right
    teach: Callable[[Row, random.Random, float], str]  # an answer that is right with about this probability
    max_positions: int = 64  # longest question and response together
    scale: float = 1.0  # training rewards are scale * reward + shift; evaluation uses the reward
    shift: float = 0.0

    def rows(self, num_train: int = 4096, num_held_out: int = 256) -> tuple[list[Row], list[Row]]:
        """(train, held out): distinct questions, none in both sets, the same on every call."""
        generator = random.Random(SPLIT_SEED)
        found: dict[str, Row] = {}
        while len(found) < num_train + num_held_out:
            row = self.draw(generator)
            found.setdefault(row.question, row)
        rows = list(found.values())
        generator.shuffle(rows)
        return rows[num_held_out:], rows[:num_held_out]
