"""Classes of equal answers, for majority votes. Not covered: counting the votes."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from oblr_megatron.rewards.math import settle
from oblr_megatron.rewards.verifier.compare import canonical
from oblr_megatron.rewards.votes import MAX_CHARS, MAX_COMPARISONS, answer_classes


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["1/2", "0.5", None, "3", r"\frac12", "3.0"], [1, 1, 0, 0, 1, 0], [0, 0, None, 1, 0, 1]),
        (["3", "3.0", "4"], [0, 0, 0], [0, 0, 1]),
        ([r"\sqrt{8}", r"2\sqrt{2}"], [1, 1], [0, 0]),  # computer algebra found both right
        ([r"\sqrt{8}", r"2\sqrt{2}"], [0, 0], [0, 1]),  # not used here
        ([r"\sqrt{8} ", r"\sqrt 8", "$\\sqrt{8}$."], [0, 0, 0], [0, 0, 0]),
        (["50", "50%"], [1, 0], [0, 1]),  # a wrong answer never joins the right answers
        (["1, 2", "2,1", "(1,2)", "(2,1)"], [0, 0, 0, 0], [0, 0, 1, 2]),
        (["", "", "x"], [0, 0, 0], [0, 0, 1]),
        ([None, None], [0, 0], [None, None]),
        ([], [], []),
    ],
)
def test_classes(answers: list[str | None], right: list[int], expected: list[int | None]) -> None:
    assert answer_classes(answers, [bool(one) for one in right], by_value=True) == expected


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["3 1 2", "3, 1, 2", "1, 3, 2", "2, 1, 3", " 3  1 2\n"], [0, 0, 0, 0, 0], [0, 1, 2, 3, 0]),
        (["0.5", "1/2", "A", "a", None], [0, 0, 0, 0, 0], [0, 1, 2, 3, None]),
        (["x", "1 2", "2 1", "x"], [0, 1, 1, 0], [0, 1, 1, 0]),
    ],
)
def test_classes_of_texts(answers: list[str | None], right: list[int], expected: list[int | None]) -> None:
    assert answer_classes(answers, [bool(one) for one in right], by_value=False) == expected


def test_numbers_with_equal_values_are_in_one_class() -> None:
    generator = random.Random(0)
    values = [Fraction(generator.randint(-3, 3), generator.choice((1, 2, 4, 5))) for _ in range(64)]
    answers = [generator.choice((str(v), f"\\frac{{{v.numerator}}}{{{v.denominator}}}", str(float(v)))) for v in values]
    classes = answer_classes(answers, [False] * 64, by_value=True)
    for i, value in enumerate(values):
        assert all((classes[i] == classes[j]) is (value == other) for j, other in enumerate(values))


def test_unreadable_texts_are_compared_as_text() -> None:
    too_deep = ("x=" * 15 + "(") * 60 + "1" + ")" * 60
    with pytest.raises(RecursionError):
        canonical(too_deep)
    answers: list[str | None] = ["\\", "{", "?!", "9" * 3000, "(" * 60, "\\", too_deep, too_deep]
    assert answer_classes(answers, [False] * 8, by_value=True) == [0, 1, 2, 3, 4, 0, 5, 5]


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many different answers only so many pairs are compared, those of the most frequent answers first."""
    compared: list[tuple[str, str]] = []

    def counted(answer: str, other: str) -> bool:
        compared.append((answer, other))
        return settle(answer, other) is True

    monkeypatch.setattr("oblr_megatron.rewards.votes.settle", counted)
    long = ["x+" * 200 + str(number) for number in range(64)]
    short = [f"x^{{{number}}}+1" for number in range(10, 138)]
    answers = [*long, *short, r"\frac{2}{4}", "1/2", "1/2", r"\frac{2}{4}"]
    assert answer_classes(answers, [False] * len(answers), by_value=True) == [*range(193), 192, 192, 192]
    assert len(compared) == MAX_COMPARISONS and compared[0] == ("1/2", r"\frac{2}{4}")
    assert max(len(text) for pair in compared for text in pair) <= MAX_CHARS
