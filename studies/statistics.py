"""What a few seeds say: intervals of means and of paired differences, and figures of one learning curve. Pure.

Seeds are few (five to ten), so intervals are Student's; the bootstrap stands beside them where values are skewed, and
is too narrow for so few. The sign-flip test asks no distribution but symmetry: with n pairs its two-sided p is a
multiple of 2 / 2^n, 0.0625 at least for five.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEVEL = 0.95
RESAMPLES = 10_000
EXACT_UP_TO = 14  # pairs whose sign flips are all tried
SEED = 0  # of the resamples: the same figures every time


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and where it may lie; ends are NaN where nothing is known. Example: Interval(0.61, 0.55, 0.67)."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference of two arms. Example: Difference(Interval(0.02, 0.01, 0.03), p=0.0625, pairs=5)."""

    interval: Interval
    p: float
    pairs: int


def t_interval(values: Array, level: float = LEVEL) -> Interval:
    """[n] -> mean -+ t_{n-1} s / sqrt(n); of a single value the ends are NaN, of none the mean too."""
    from scipy.special import stdtrit

    count = len(values)
    mean = float(np.mean(values)) if count else float("nan")
    if count < 2:
        return Interval(mean, float("nan"), float("nan"))
    reach = float(stdtrit(count - 1, (1 + level) / 2) * np.std(values, ddof=1) / np.sqrt(count))
    return Interval(mean, mean - reach, mean + reach)


def bootstrap_interval(values: Array, level: float = LEVEL, resamples: int = RESAMPLES) -> Interval:
    """[n] -> the percentile bootstrap's interval of the mean; ends as for `t_interval`."""
    count = len(values)
    mean = float(np.mean(values)) if count else float("nan")
    if count < 2:
        return Interval(mean, float("nan"), float("nan"))
    drawn = np.random.default_rng(SEED).integers(count, size=(resamples, count))
    low, high = np.quantile(values[drawn].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, float(low), float(high))


def paired_difference(ours: Array, theirs: Array) -> Difference:
    """[n], [n] of the same seeds in the same order -> ours - theirs."""
    differences = ours - theirs
    return Difference(t_interval(differences), sign_flip_p(differences), len(differences))


def sign_flip_p(differences: Array) -> float:
    """[n] -> two-sided p of "the differences are symmetric about 0", by |mean| under flips of their signs.

    All 2^n flips up to EXACT_UP_TO pairs, RESAMPLES random ones (and the observed one) beyond; NaN without pairs.
    """
    count = len(differences)
    if not count:
        return float("nan")
    if count <= EXACT_UP_TO:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=count)))
    else:
        drawn = np.random.default_rng(SEED).choice((1.0, -1.0), size=(RESAMPLES, count))
        signs = np.vstack((np.ones(count), drawn))
    sums = np.abs(signs @ differences)
    return float(np.mean(sums >= sums[0] * (1 - 1e-9)))


def area_under_curve(steps: Array, values: Array, num_steps: int) -> float:
    """[n], [n] -> the mean height of the curve between step 0 and num_steps, trapezoids between its points."""
    return float(np.trapezoid(values, steps) / num_steps)


def largest_drop(values: Array) -> float:
    """[n] -> how far the curve ever fell below its highest value until then; 0 for one that never falls."""
    return float(np.max(np.maximum.accumulate(values) - values))
