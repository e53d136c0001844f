"""Statistics over a few seeds: intervals of means and of paired differences, area and largest drop of a curve.

Seeds are few (five to ten), so intervals are Student's t. The sign-flip test assumes symmetry only. With n pairs its
two-sided p is a multiple of 2 / 2^n, so at least 0.0625 for five.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEVEL = 0.95
RESAMPLES = 10_000
EXACT_UP_TO = 14  # largest number of pairs for which all sign flips are tried
SEED = 0  # of the resamples, so that results are reproducible


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its confidence interval; unknown values are NaN. Example: Interval(0.61, 0.55, 0.67)."""

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
    """[n] -> mean -+ t_{n-1} s / sqrt(n). With one value the ends are NaN; with none the mean is NaN too."""
    from scipy.special import stdtrit

    if (count := len(values)) < 2:
        return _without_ends(values)
    mean = float(np.mean(values))
    reach = float(stdtrit(count - 1, (1 + level) / 2) * np.std(values, ddof=1) / np.sqrt(count))
    return Interval(mean, mean - reach, mean + reach)


def _without_ends(values: Array) -> Interval:
    nan = float("nan")
    return Interval(float(np.mean(values)) if len(values) else nan, nan, nan)


def paired_difference(ours: Array, others: Array) -> Difference:
    """[n], [n] with the same seeds in the same order -> ours - others."""
    differences = ours - others
    return Difference(t_interval(differences), sign_flip_p(differences), len(differences))


def sign_flip_p(differences: Array) -> float:
    """[n] -> two-sided p of the hypothesis that differences are symmetric about 0, from |mean| under sign flips.

    Tries all 2^n flips up to EXACT_UP_TO pairs, else RESAMPLES random flips and the observed signs. NaN for n = 0.
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
    """[n], [n] -> mean height of the curve between step 0 and num_steps, by the trapezoidal rule."""
    return float(np.trapezoid(values, steps) / num_steps)


def steps_to(steps: Array, values: Array, target: float) -> float:
    """[n], [n] -> the step where the curve, linear between its points, first reaches the target; inf if it never does.

    >>> steps_to(np.array([0.0, 10.0, 20.0]), np.array([0.1, 0.3, 0.5]), 0.4)
    15.0
    """
    above = np.flatnonzero(values >= target)
    if not len(above):
        return math.inf
    at = int(above[0])
    if at == 0:
        return float(steps[0])
    rise = (target - values[at - 1]) / (values[at] - values[at - 1])
    return float(steps[at - 1] + rise * (steps[at] - steps[at - 1]))


def holm(values: Sequence[float]) -> list[float]:
    """p values of a family of tests -> the p values after Holm's correction, in the same order; NaN is no test.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    found, least = [math.nan] * len(values), 0.0
    known = sorted((place for place, p in enumerate(values) if not math.isnan(p)), key=lambda place: values[place])
    for rank, place in enumerate(known):
        least = max(least, min(1.0, (len(known) - rank) * values[place]))
        found[place] = least
    return found


def largest_drop(values: Array) -> float:
    """[n] -> largest fall of the curve below its earlier maximum; 0 for a curve that never falls."""
    return float(np.max(np.maximum.accumulate(values) - values))
