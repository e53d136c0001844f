"""Two-digit sums with the answer written lowest digit first: 64+87= -> 151 (151 reversed), 23+58= -> 18."""

from __future__ import annotations

import random
from itertools import zip_longest

from studies.tasks.base import Row, Task


def draw(generator: random.Random) -> Row:
    """Two numbers of two digits."""
    a, b = (generator.randint(10, 99) for _ in range(2))
    return Row(f"{a}+{b}=", str(a + b)[::-1])


def reward(response: str, answer: str) -> float:
    """1 if all digits are equal."""
    return float(response == answer)


def teach(row: Row, generator: random.Random, share_right: float) -> str:
    """The right answer, or one with a wrong digit, or one without carries."""
    if generator.random() < share_right:
        return row.answer
    if generator.random() < 0.5:
        place = generator.randrange(len(row.answer))
        wrong = (int(row.answer[place]) + generator.randint(1, 9)) % 10
        return f"{row.answer[:place]}{wrong}{row.answer[place + 1 :]}"
    a, b = row.question.rstrip("=").split("+")
    digits = zip_longest(reversed(a), reversed(b), fillvalue="0")
    return "".join(str((int(x) + int(y)) % 10) for x, y in digits)


SUMS = Task(
    name="sums",
    module=__name__,
    characters="0123456789+=",
    max_response_tokens=5,
    skills={"low": 0.12, "middle": 0.4, "high": 0.75},
    draw=draw,
    reward=reward,
    teach=teach,
)
