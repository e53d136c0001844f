"""Intervals, tests and curve statistics against scipy and known cases."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from studies.statistics import (
    area_under_curve,
    holm,
    largest_drop,
    paired_difference,
    sign_flip_p,
    steps_to,
    t_interval,
)


@pytest.mark.parametrize("count", [2, 5, 30])
def test_the_t_interval_is_scipys(count: int) -> None:
    values = np.random.default_rng(count).normal(0.6, 0.1, count)
    found = t_interval(values, 0.9)
    wanted = stats.t.interval(0.9, count - 1, loc=values.mean(), scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx(wanted, rel=1e-12)
    assert found.mean == pytest.approx(values.mean())


def test_one_value_has_a_mean_and_no_interval() -> None:
    interval = t_interval(np.array([0.5]))
    assert interval.mean == 0.5 and np.isnan(interval.low) and np.isnan(interval.high)
    assert np.isnan(t_interval(np.array([])).mean)


@pytest.mark.parametrize("count", [4, 9])
def test_sign_flips_are_scipys_permutation_test(count: int) -> None:
    values = np.random.default_rng(count).normal(0.5, 1.0, count)
    wanted = stats.permutation_test(
        (values,), lambda x: abs(np.mean(x)), permutation_type="samples", alternative="greater", n_resamples=np.inf
    )
    assert sign_flip_p(values) == pytest.approx(wanted.pvalue)


def test_sign_flips_in_known_cases() -> None:
    assert sign_flip_p(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == 2 / 2**5
    assert sign_flip_p(np.array([1.0, -1.0])) == 1.0
    assert sign_flip_p(np.zeros(3)) == 1.0
    assert np.isnan(sign_flip_p(np.array([])))


def test_random_flips_of_many_pairs_agree_with_the_t_test() -> None:
    values = np.random.default_rng(5).normal(0.3, 1.0, 40)
    assert sign_flip_p(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.01)


def test_pairing_removes_the_seeds_common_part() -> None:
    draw = np.random.default_rng(7)
    common = draw.normal(0.0, 1.0, 6)
    ours, others = common + 0.1 + draw.normal(0, 0.01, 6), common + draw.normal(0, 0.01, 6)
    difference = paired_difference(ours, others)
    assert difference.pairs == 6 and difference.p == 2 / 2**6
    assert 0 < difference.interval.low < 0.1 < difference.interval.high < 0.2
    unpaired = stats.ttest_ind(ours, others).pvalue
    assert unpaired > 0.5


def test_the_area_is_the_mean_height() -> None:
    assert area_under_curve(np.array([0.0, 5, 10]), np.array([0.4, 0.4, 0.4]), 10) == pytest.approx(0.4)
    assert area_under_curve(np.array([0.0, 10]), np.array([0.0, 1.0]), 10) == pytest.approx(0.5)
    uneven = area_under_curve(np.array([0.0, 2, 10]), np.array([0.0, 1.0, 1.0]), 10)
    assert uneven == pytest.approx((1.0 + 8.0) / 10)


def test_the_largest_drop_is_from_the_best_so_far() -> None:
    assert largest_drop(np.array([0.1, 0.5, 0.3, 0.6, 0.55])) == pytest.approx(0.2)
    assert largest_drop(np.array([0.1, 0.2, 0.2, 0.9])) == 0.0
    assert largest_drop(np.array([0.9, 0.5, 0.7, 0.2])) == pytest.approx(0.7)


def test_holm_rejects_what_the_step_down_rule_rejects() -> None:
    """Holm 1979: in ascending order, reject while p <= level / (tests left)."""
    values = list(np.random.default_rng(3).uniform(0, 0.1, 8))
    for level in (0.01, 0.05, 0.2):
        rejected, ordered = set(), sorted(range(8), key=lambda index: values[index])
        for rank, index in enumerate(ordered):
            if values[index] > level / (8 - rank):
                break
            rejected.add(index)
        assert {index for index, p in enumerate(holm(values)) if p <= level} == rejected
    assert holm([0.7, 0.9]) == [1.0, 1.0] and holm([]) == []
    assert holm([0.01, float("nan"), 0.04]) == pytest.approx([0.02, float("nan"), 0.04], nan_ok=True)


def test_steps_to_a_target() -> None:
    steps, values = np.array([0.0, 10.0, 20.0, 30.0]), np.array([0.2, 0.5, 0.4, 0.9])
    assert steps_to(steps, values, 0.1) == 0 and steps_to(steps, values, 0.5) == 10
    assert steps_to(steps, values, 0.35) == pytest.approx(5) and steps_to(steps, values, 0.65) == pytest.approx(25)
    assert steps_to(steps, values, 0.95) == float("inf")
