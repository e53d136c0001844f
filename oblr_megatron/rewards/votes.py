"""Group equal answers to one question into classes, for majority votes.

No worker processes are used, so every rank and every repetition finds the same classes. Two answers that only computer
algebra can compare are in different classes, unless both are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from oblr_megatron.rewards.math import settle
from oblr_megatron.rewards.verifier.compare import canonical, plain_number


def answer_classes(answers: Sequence[str | None], right: Sequence[bool]) -> list[int | None]:
    r"""The class of each answer; None if there is no answer.

    All right answers are one class, since each equals the gold answer. A wrong answer joins the first class of wrong
    answers with an equal first member, by canonical text or `settle`.

    Args:
        answers: [K] to one question, as extracted.
        right: [K] whether each answer is right.

    Example: (["1/2", "0.5", None, "3", r"\frac12", "3.0"], [True, True, False, False, True, False])
        -> [0, 0, None, 1, 0, 1]; classes are numbered in order of occurrence.
    """
    assert len(answers) == len(right), f"{len(answers)} answers, but {len(right)} values in `right`"
    classes: list[int | None] = []
    numbers: dict[Fraction | str | None, int] = {}  # class by value or text of wrong answers; None: the right answers
    first: list[str | None] = []  # first member of each class; None: the right answers
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
    """The value of a plain number, else the canonical text; the text as it is if it cannot be read."""
    number = plain_number(answer)
    if number is not None:
        return number
    try:
        return canonical(answer)
    except Exception:  # noqa: BLE001 - whatever a policy writes, a vote must not end the run
        return answer


def _class_of(answer: str, first: Sequence[str | None]) -> int:
    """The class with an equal first member, else the number of a new class.

    Plain numbers are not compared with each other, since equal ones share a key: this avoids K^2 comparisons.
    """
    plain = plain_number(answer) is not None
    others = ((number, member) for number, member in enumerate(first) if member is not None)
    same = (
        number
        for number, member in others
        if not (plain and plain_number(member) is not None) and settle(answer, member)
    )
    return next(same, len(first))
