"""A walk on a ring of ten places. The reward is 1 only if every place on the way is right.

4+3-2+1+1-3:  ->  75674    the place after each step
"""

from __future__ import annotations

import random
import re

from studies.tasks.base import Row, Task

STEPS = 5


def draw(generator: random.Random) -> Row:
    """A start and five steps of one to three places, forwards or backwards."""
    start = str(generator.randrange(10))
    question = start + "".join(f"{generator.choice('+-')}{generator.randint(1, 3)}" for _ in range(STEPS)) + ":"
    return Row(question, "".join(map(str, places(question))))


def reward(response: str, answer: str) -> float:
    """1 if all places are right."""
    return float(response == answer)


def teach(row: Row, generator: random.Random, share_right: float) -> str:
    """Each step may be wrong, and the walk continues from there. A share `share_right` of walks has no error."""
    chance, drift, told = share_right ** (1 / STEPS), 0, ""
    for place in row.answer:
        if generator.random() > chance:
            drift += generator.randint(1, 9)
        told += str((int(place) + drift) % 10)
    return told


def places(question: str) -> list[int]:
    """The place after each step. Example: "4+3-2:" -> [7, 5]."""
    start, *steps = map(int, re.findall(r"(?:^|[+-])\d", question))
    return [(start + sum(steps[:count])) % 10 for count in range(1, len(steps) + 1)]


WALK = Task(
    name="walk",
    module=__name__,
    characters="0123456789+-:",
    max_response_tokens=STEPS + 2,
    skills={"low": 0.02, "middle": 0.08, "high": 0.3},
    draw=draw,
    reward=reward,
    teach=teach,
)
