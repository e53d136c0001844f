"""A long sum with written reasoning: 50 to 90 tokens a response, of which only the answer is scored.

    4+5+2+4:  ->  4+5=9;9+2=1;1+4=5;!5      one line for each "+", last digits only; "!" and the answer

A policy may skip lines and guess. One slip anywhere makes the answer wrong.
"""

from __future__ import annotations

import random

from studies.tasks.base import Row, Task

FEWEST, MOST = 9, 15


def draw(generator: random.Random) -> Row:
    """Nine to fifteen terms between 1 and 9."""
    terms = [generator.randint(1, 9) for _ in range(generator.randint(FEWEST, MOST))]
    return Row("+".join(map(str, terms)) + ":", str(sum(terms) % 10))


def reward(response: str, answer: str) -> float:
    """1 if the text after the first "!" is the answer."""
    _, sign, given = response.partition("!")
    return float(bool(sign) and given == answer)


def teach(row: Row, generator: random.Random, share_right: float) -> str:
    """All lines right; or some lines and a guess; or all lines with one slip that propagates."""
    terms = [int(term) for term in row.question.rstrip(":").split("+")]
    if generator.random() < share_right:
        return written(terms)
    if generator.random() < 0.5:
        kept = generator.randrange(1, len(terms) - 1)
        return written(terms[: kept + 1]).partition("!")[0] + f"!{generator.randrange(10)}"
    return written(terms, slip_at=generator.randrange(1, len(terms)), slip=generator.randint(1, 9))


def written(terms: list[int], slip_at: int = 0, slip: int = 0) -> str:
    """The lines and the answer. Example: [4, 5, 2] -> "4+5=9;9+2=1;!1"."""
    total, text = terms[0] % 10, ""
    for place, term in enumerate(terms[1:], 1):
        found = (total + term + (slip if place == slip_at else 0)) % 10
        text += f"{total}+{term}={found};"
        total = found
    return f"{text}!{total}"


LEDGER = Task(
    name="ledger",
    module=__name__,
    characters="0123456789+=;:!",
    max_response_tokens=6 * (MOST - 1) + 4,
    max_positions=128,
    skills={"low": 0.15, "middle": 0.4, "high": 0.7},
    draw=draw,
    reward=reward,
    teach=teach,
)
