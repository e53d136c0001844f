r"""Comparing numbers within a tolerance. Oracle: Python's Fraction. Not covered: reading tolerances from data sets."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oblr_megatron.rewards.math import MathReward, grade
from oblr_megatron.rewards.verifier.extract import EXTRACTIONS
from oblr_megatron.rewards.verifier.tolerance import within
from oblr_megatron.types import Prompt, Sample


@pytest.mark.parametrize(
    ("prediction", "gold", "tolerance", "expected"),
    [
        ("4.3", "4.2", "0.1", True), ("4.1", "4.2", "1e-1", True), ("4.31", "4.2", "0.1", False),
        ("4.30000000000000000001", "4.2", "0.1", False), (r"\frac{13}{3}", "4.2", "0.1", False),
        (r"\frac{43}{10}", "4.2", "0.1", True), (r"4.25\%", "4.2", "0.1", True), ("0.0425", r"4.2\%", "0.1", True),
        ("0.044", r"4.2\%", "0.1", False), ("4.2\\text{ km}", "4.2", "0.1", True), ("x = 4.25", "4.2", "0.1", True),
        ("101", "100", "1%", True), ("99", "100", "1%", True), ("101.0001", "100", "1%", False),
        ("-101", "-100", "1%", True), ("101", "-100", "1%", False), ("4,240", "4200", "1%", True),
        (r"2.89 \times 10^{-19}", "2.88e-19", "1%", True), ("2.95e-19", "2.88e-19", "1%", False),
        ("0", "2.88e-19", "1%", False), ("0", "0", "1%", True), ("5", "5", "0", True),
        (r"2\pi \approx 6.28", "6.28", "1%", True), (r"x = \sqrt{18} = 3\sqrt{2} \approx 4.24", "4.243", "1%", True),
        (r"\approx 4.3", "4.3", "1%", True), (r"\approx 4.4", "4.3", "1%", False),
        (r"4.2 \approx 4.3", "4.3", "1%", False), (r"a = 4.3 \approx b = 7", "4.3", "1%", False),
        (r"4.3\ \Omega", "4.3", "1%", True), (r"4.4\ \text{k}\Omega", "4.3", "1%", False),
        (r"4.3\,\mu\text{m}", "4.3", "1%", True), ("5.1", "5", "0%", False),
    ],
)  # fmt: skip
def test_numbers_within_a_tolerance(prediction: str, gold: str, tolerance: str, expected: bool) -> None:
    assert within(prediction, gold, tolerance) is expected
    assert grade(f"\\boxed{{{prediction}}}", gold, tolerance) is expected


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [
        ("4.3, 5", "4.2, 5", False), ("(1,2)", "(1,2)", True), ("x+1", "1+x", True), (r"3\sqrt{2}", "4.2", False),
        ("4.2 or 4.25", "4.2", False), ("B", "A", False), (r"\pi", "3.1", False), ("4.25_8", "4.2", False),
        (r"x > 2\sqrt{3} \approx 4.2", "4.2", False), (r"5, \sqrt{18} \approx 4.2", "4.2", False),
        (r"4.2\mu", "4.2", False),
    ],
)  # fmt: skip
def test_other_answers_are_compared_exactly(prediction: str, gold: str, expected: bool) -> None:
    assert within(prediction, gold, "0.1") is None
    assert grade(f"\\boxed{{{prediction}}}", gold, "0.1") is expected


@pytest.mark.parametrize("tolerance", ["", "%", "abc", "-1", "1e999999999", "1%%", "nan", "inf", "1/0", " ", "0.1 mm"])
def test_a_malformed_tolerance_is_ignored(tolerance: str) -> None:
    assert within("5", "5", tolerance) is None
    assert grade(r"\boxed{5.0001}", "5", tolerance) is False


@given(st.decimals(-1000, 1000, places=3), st.decimals(-1000, 1000, places=3), st.integers(0, 500))
def test_the_bound_is_exact(a, b, thousandths: int) -> None:
    first, second, bound = Fraction(a), Fraction(b), Fraction(thousandths, 1000)
    assert within(f"{b:f}", f"{a:f}", str(thousandths / 1000)) is (abs(first - second) <= bound)
    assert within(f"{b:f}", f"{a:f}", f"{thousandths / 10}%") is (abs(first - second) <= bound * abs(first))


def test_the_reward_uses_the_tolerance_of_the_prompt() -> None:
    """The same answer and gold answer, with and without a tolerance."""
    prompts = [Prompt(q, f"p{q}", "", (q,), "4.2", "test", tolerance) for q, tolerance in enumerate(("0.1", "", "1%"))]
    samples = [Sample(q, (q,), (1,), (0.0,), r"\boxed{4.3}", "stop", 0) for q in range(3)]
    with MathReward(EXTRACTIONS["math"], num_workers=1, deadline_s=10.0) as reward:
        assert reward.score(prompts, samples).rewards == [1, 0, 0]
