"""The last digit of a long sum. The policy chooses how much of the reasoning it writes out.

    4+5+2+4:  ->  915=5      last digits of the partial sums, "=", the answer; only the text after "=" is scored

A response may skip the reasoning and guess: "=3" is short and right one time in ten. Length, gradient norm and
correctness are therefore correlated. There a norm-weighted baseline should differ from a plain mean.
"""

from __future__ import annotations

import random

from studies.tasks.base import Row, Task

FEWEST, MOST = 3, 6


def draw(generator: random.Random) -> Row:
    """Three to six terms between 1 and 5."""
    terms = [generator.randint(1, 5) for _ in range(generator.randint(FEWEST, MOST))]
    return Row("+".join(map(str, terms)) + ":", str(sum(terms) % 10))


def reward(response: str, answer: str) -> float:
    """1 if the text after the first "=" is the answer."""
    _, sign, given = response.partition("=")
    return float(bool(sign) and given == answer)


def teach(row: Row, generator: random.Random, share_right: float) -> str:
    """The right chain; or part of it and a guess; or the whole chain with an error that propagates."""
    partial = partial_sums(row.question)
    if generator.random() < share_right:
        return "".join(map(str, partial)) + f"={partial[-1]}"
    if generator.random() < 0.5:
        return "".join(map(str, partial[: generator.randrange(len(partial))])) + f"={generator.randrange(10)}"
    place, shift = generator.randrange(len(partial)), generator.randint(1, 9)
    slipped = [digit if at < place else (digit + shift) % 10 for at, digit in enumerate(partial)]
    return "".join(map(str, slipped)) + f"={slipped[-1]}"


def partial_sums(question: str) -> list[int]:
    """Last digits of the sums of the first two, three, ... terms. Example: "7+5+9+4:" -> [2, 1, 5]."""
    terms = [int(term) for term in question.rstrip(":").split("+")]
    return [sum(terms[:count]) % 10 for count in range(2, len(terms) + 1)]


CHAIN = Task(
    name="chain",
    module=__name__,
    characters="0123456789+:=",
    max_response_tokens=10,
    skills={"low": 0.1, "middle": 0.35, "high": 0.7},
    draw=draw,
    reward=reward,
    teach=teach,
)
