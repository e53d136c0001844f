"""Group equal answers to one question into classes, for majority votes.

The reward says whether answers are compared as mathematics or as texts. No worker processes are used, so every rank and
every repetition finds the same classes. Two answers that only computer algebra can compare are in different classes,
unless both are right. Time is bounded: long answers are compared as texts, and a question has at most MAX_COMPARISONS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

from oblr_megatron.rewards.math import settle
from oblr_megatron.rewards.verifier.compare import canonical, plain_number

MAX_CHARS = 100  # longer answers are compared as texts
MAX_COMPARISONS = 500  # of wrong answers to one question by `settle`: all pairs of 32; the most frequent come first

Key = Fraction | str | None  # value or text of a wrong answer; None: the right answers


def answer_classes(answers: Sequence[str | None], right: Sequence[bool], *, by_value: bool) -> list[int | None]:
    r"""The class of each answer; None if there is no answer.

    All right answers are one class, since each equals the gold answer. Wrong answers are in one class if their keys are
    equal: the text with white space collapsed, or with `by_value` the number or the canonical text. With `by_value`, a
    key also joins another class if `settle` finds it equal to the most frequent key of that class.

    Args:
        answers: [K] to one question, as extracted.
        right: [K] whether each answer is right.
        by_value: compare as mathematics.

    Example: (["1/2", "0.5", None, "3", r"\frac12", "3.0"], [True, True, False, False, True, False], by_value=True)
        -> [0, 0, None, 1, 0, 1]; classes are numbered in order of occurrence.
    """
    assert len(answers) == len(right), f"{len(answers)} answers, but {len(right)} values in `right`"
    key_of = _value if by_value else _text
    keys = {
        place: None if right[place] else key_of(answer) for place, answer in enumerate(answers) if answer is not None
    }
    wrong = {key: answers[place] or "" for place, key in reversed(keys.items()) if key is not None}
    first = _merged(Counter(key for key in keys.values() if key is not None), wrong) if by_value else {}
    numbers: dict[Key, int] = {}
    for key in keys.values():
        numbers.setdefault(first.get(key, key), len(numbers))
    return [numbers[first.get(keys[place], keys[place])] if place in keys else None for place in range(len(answers))]


def _text(answer: str) -> str:
    return " ".join(answer.split())


def _value(answer: str) -> Fraction | str:
    """The value of a plain number, else the canonical text; the text as it is if it is long or cannot be read."""
    number = plain_number(answer)
    if number is not None:
        return number
    try:
        return canonical(answer) if len(answer) <= MAX_CHARS else answer
    except Exception:  # noqa: BLE001 - whatever a policy writes, a vote must not end the run
        return answer


def _merged(counts: Counter[Fraction | str], texts: Mapping[Fraction | str, str]) -> dict[Key, Key]:
    """The first key of each key's class, by `settle`, frequent keys first; `texts` has an answer of each key.

    Plain numbers are not compared with each other: their keys differ if their values do.
    """
    first: dict[Key, Key] = {}
    classes: list[Fraction | str] = []
    left = MAX_COMPARISONS
    for key, _ in counts.most_common():
        others = [other for other in classes if not (isinstance(key, Fraction) and isinstance(other, Fraction))]
        asked = others[:left] if len(texts[key]) <= MAX_CHARS else []
        left -= len(asked)
        first[key] = next((other for other in asked if settle(texts[key], texts[other])), key)
        if first[key] == key and len(texts[key]) <= MAX_CHARS:
            classes.append(key)
    return first
