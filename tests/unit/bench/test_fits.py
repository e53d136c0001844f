"""The benchmark's fits recover exact power laws and reject costs that determine none."""

from __future__ import annotations

import math

import pytest
from fits import power_law
from hypothesis import given, settings
from hypothesis import strategies as st

STAR = {"samples": [4, 2, 8, 4, 4], "tokens": [512, 512, 512, 256, 1024]}  # one variable at a time
exponent = st.floats(-2, 3)


@settings(deadline=None)
@given(first=exponent, second=exponent, factor=st.floats(1e-6, 1e6))
def test_exponents_of_a_power_law_come_back(first: float, second: float, factor: float) -> None:
    costs = [factor * g**first * t**second for g, t in zip(*STAR.values(), strict=True)]
    fit = power_law(costs, STAR)
    assert fit.exponents["samples"] == pytest.approx(first, abs=1e-6)
    assert fit.exponents["tokens"] == pytest.approx(second, abs=1e-6)
    assert fit.factor == pytest.approx(factor, rel=1e-5)
    assert fit.points == 5


def test_a_variable_that_stands_still_has_no_exponent() -> None:
    fit = power_law([2.0, 4.0, 8.0], {"samples": [1, 2, 4], "tokens": [7, 7, 7]})
    assert fit.exponents["samples"] == pytest.approx(1)
    assert math.isnan(fit.exponents["tokens"])
    assert fit.r_squared == pytest.approx(1)


def test_costs_without_logarithm_are_left_out_and_too_few_say_nothing() -> None:
    """-1 is a difference turned negative by noise. Four points are left for three unknowns."""
    fit = power_law([-1.0, 2.0, 8.0, 2.0, 8.0], STAR)
    assert fit.points == 4
    assert fit.exponents["samples"] == pytest.approx(1)
    assert fit.exponents["tokens"] == pytest.approx(1)
    few = power_law([-1.0, 0.0, 8.0, 2.0, 8.0], STAR)
    assert few.points == 3
    assert math.isnan(few.exponents["samples"]) and math.isnan(few.r_squared)
