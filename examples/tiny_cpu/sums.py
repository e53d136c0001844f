"""The demo's task: two-digit sums. Answers have the lowest digit first, so that carries follow the reading direction.

    23+58=  ->  18      (81 reversed)
    64+87=  ->  151     (151 reversed)

`mixed_answer` is the teacher of the warm start. It is right about a third of the time, else it gets one digit wrong or
forgets the carries. A policy that imitates it can solve the task but does not prefer to. RL can change this.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

SMALLEST, LARGEST = 10, 99
SHARE_RIGHT, SHARE_SLIPPED = 0.35, 0.35  # the remaining answers forget the carries


@dataclass(frozen=True, slots=True)
class Row:
    """One line of train.jsonl or heldout.jsonl.

    Example: Row(id="sum-23-58", question="23+58=", answer="18", source="two-digit-sums")
    """

    id: str
    question: str
    answer: str
    source: str = "two-digit-sums"

    def as_dict(self) -> dict[str, str]:
        """The JSON object of this row."""
        return asdict(self)


def make_row(a: int, b: int) -> Row:
    """The row of the sum a + b."""
    return Row(id=f"sum-{a}-{b}", question=f"{a}+{b}=", answer=lowest_first(a + b))


def lowest_first(number: int) -> str:
    """Decimal digits, lowest first. Examples: 81 -> "18", 120 -> "021"."""
    return str(number)[::-1]


def split_rows(num_heldout: int, seed: int) -> tuple[list[Row], list[Row]]:
    """(train, heldout) rows. a + b and b + a are on the same side, so training never shows a held-out sum."""
    generator = random.Random(seed)
    pairs = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(a, LARGEST + 1)]
    generator.shuffle(pairs)
    heldout = [make_row(*generator.choice([(a, b), (b, a)])) for a, b in pairs[:num_heldout]]
    both_orders = {order for a, b in pairs[num_heldout:] for order in [(a, b), (b, a)]}
    train = [make_row(a, b) for a, b in sorted(both_orders)]
    generator.shuffle(train)
    return train, heldout


def mixed_answer(row: Row, generator: random.Random) -> str:
    """An answer of mixed quality: right, with one wrong digit, or without carries."""
    draw = generator.random()
    if draw < SHARE_RIGHT:
        return row.answer
    if draw < SHARE_RIGHT + SHARE_SLIPPED:
        return _slip_digit(row.answer, generator)
    return _forget_carries(row.question)


def _slip_digit(answer: str, generator: random.Random) -> str:
    """The answer with one wrong digit."""
    place = generator.randrange(len(answer))
    wrong = (int(answer[place]) + generator.randint(1, 9)) % 10
    return f"{answer[:place]}{wrong}{answer[place + 1 :]}"


def _forget_carries(question: str) -> str:
    """The sum without carries. Example: "64+87=" -> "14". It is right if the sum has no carry."""
    a, b = question.rstrip("=").split("+")
    return "".join(str((int(x) + int(y)) % 10) for x, y in zip(reversed(a), reversed(b), strict=True))
