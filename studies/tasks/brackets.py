"""Close the open brackets: ([{}<  ->  >])   The reward is graded by the length of the right prefix."""

from __future__ import annotations

import random
from itertools import takewhile

from studies.tasks.base import Row, Task

PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}
FEWEST, MOST, LENGTH = 2, 6, 10


def draw(generator: random.Random) -> Row:
    """At most ten brackets, of which two to six stay open."""
    opened = generator.randint(FEWEST, MOST)
    text, stack = "", list[str]()
    while len(stack) < opened or (len(text) + 1 < LENGTH and generator.random() < 0.5):
        if stack and len(text) + 1 + opened - len(stack) < LENGTH and generator.random() < 0.4:
            text += PAIRS[stack.pop()]
        elif len(stack) < opened:
            stack.append(generator.choice("([{<"))
            text += stack[-1]
        else:
            break
    return Row(text + "=", "".join(PAIRS[bracket] for bracket in reversed(stack)))


def reward(response: str, answer: str) -> float:
    """Length of the common prefix / length of the longer text: 1 if equal, 0 if the first bracket is wrong."""
    common = takewhile(lambda pair: pair[0] == pair[1], zip(response, answer, strict=False))
    return len(list(common)) / max(len(response), len(answer))


def teach(row: Row, generator: random.Random, share_right: float) -> str:
    """The right answer, or one with two brackets swapped, one replaced, or the end missing."""
    right = row.answer
    if generator.random() < share_right:
        return right
    place = generator.randrange(len(right) - 1)
    kind = generator.randrange(3)
    if kind == 0:
        return right[:place] + right[place + 1] + right[place] + right[place + 2 :]
    if kind == 1:
        return right[:place] + generator.choice(")]}>") + right[place + 1 :]
    return right[: place + 1]


BRACKETS = Task(
    name="brackets",
    module=__name__,
    characters="()[]{}<>=",
    max_response_tokens=MOST + 2,
    skills={"low": 0.1, "middle": 0.4, "high": 0.75},
    draw=draw,
    reward=reward,
    teach=teach,
)
