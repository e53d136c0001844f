"""Sums of very different difficulty: one pool of rewards is wrong for every prompt.

    easy    47+6=      1 right in about 1.02 tries at the start
    middle  47+61=     the teacher's skill
    hard    475+618=   1 right in about 50 tries or more

Answers are written lowest digit first, as in `sums`.
"""

from __future__ import annotations

import math
import random

from studies.tasks import sums
from studies.tasks.base import Row, Task

EASY, MIDDLE, HARD = 4.5, 0.3, -4.0  # added to the log-odds of the teacher's skill


def draw(generator: random.Random) -> Row:
    """One of the three kinds, equally often. Easy questions repeat, so that a split has about a quarter of them."""
    kind = generator.randrange(3)
    a = generator.randint(100, 999) if kind == 2 else generator.randint(10, 99)
    b = (generator.randint(1, 9), generator.randint(10, 99), generator.randint(100, 999))[kind]
    a, b = (b, a) if kind == 0 and generator.random() < 0.5 else (a, b)
    return Row(f"{a}+{b}=", str(a + b)[::-1])


def teach(row: Row, generator: random.Random, share_right: float) -> str:
    """As the teacher of `sums`, with the kind's own share of right answers; always right if share_right is 1."""
    a, b = row.question.rstrip("=").split("+")
    offset = EASY if min(len(a), len(b)) == 1 else MIDDLE if len(a) == 2 else HARD
    if 0 < share_right < 1:
        share_right = 1 / (1 + math.exp(-offset) * (1 - share_right) / share_right)
    return sums.teach(row, generator, share_right)


MIXED = Task(
    name="mixed",
    module=__name__,
    characters="0123456789+=",
    max_response_tokens=6,
    skills={"low": 0.25, "middle": 0.5, "high": 0.75},
    draw=draw,
    reward=sums.reward,
    teach=teach,
)
