"""Which answers to one question say the same: the classes that a majority is counted over.

Pure: no worker processes, so that every rank and every repetition finds the same classes. Answers whose equality only
computer algebra could tell stay apart, unless both were judged right.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from oblr_megatron.rewards.math import settle
from oblr_megatron.rewards.verifier.compare import canonical, plain_number


def answer_classes(answers: Sequence[str | None], right: Sequence[bool]) -> list[int | None]:
    r"""A number for each answer, the same for those that are equal; None where there is no answer.

    All right answers are one class, since each equals the gold one. A wrong answer joins the first class of wrong ones
    whose first member has its canonical text or settles as equal to it.

    Args:
        answers: [K] to one question, as extracted.
        right: [K] the verdicts.

    Example: (["1/2", "0.5", None, "3", r"\frac12", "3.0"], [True, True, False, False, True, False])
        -> [0, 0, None, 1, 0, 1]; classes are numbered as they first occur.
    """
    assert len(answers) == len(right), f"{len(answers)} answers with {len(right)} verdicts"
    classes: list[int | None] = []
    numbers: dict[Fraction | str | None, int] = {}  # by value or canonical text of wrong answers; None: the right ones
    first: list[str | None] = []  # member of each class; None: the right ones
    for answer, is_right in zip(answers, right, strict=True):
        if answer is None:
            classes.append(None)
            continue
        key = None if is_right else _key(answer)
        if key not in numbers:
            numbers[key] = len(first) if is_right else _class_of(answer, first)
            if numbers[key] == len(first):
                first.append(None if is_right else answer)
        classes.append(numbers[key])
    return classes


def _key(answer: str) -> Fraction | str:
    """Equal for answers that say the same at sight."""
    number = plain_number(answer)
    return canonical(answer) if number is None else number


def _class_of(answer: str, first: Sequence[str | None]) -> int:
    """The class whose first member equals the answer; a new one's number if there is none.

    Plain numbers of different value are not compared: with K of them that would take K^2 comparisons.
    """
    plain = plain_number(answer) is not None
    others = ((number, member) for number, member in enumerate(first) if member is not None)
    same = (
        number
        for number, member in others
        if not (plain and plain_number(member) is not None) and settle(answer, member)
    )
    return next(same, len(first))
