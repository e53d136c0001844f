"""Choose an arm's learning rate: the best of a grid. The grid grows while the best rate lies on its edge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """State of a sweep. Example: Choice(rates=(3e-4, 1e-3), missing=(), best=1e-3, on_edge=True)."""

    rates: tuple[float, ...]  # the grid with its extensions, ascending
    missing: tuple[float, ...]  # rates without a result
    best: float | None  # None while rates are missing, or if every rate failed
    on_edge: bool  # the best rate is the smallest or largest, and the grid may not grow further


def choose(grid: Sequence[float], extensions: int, means: Mapping[float, float]) -> Choice:
    """The rates to run next, or the rate with the largest mean area under the curve.

    Args:
        grid: rates, ascending; a single rate is taken without a sweep.
        extensions: largest number of rates to add.
        means: rate -> mean area over the sweep's seeds. NaN marks a rate with a failed run; it is never the best.
    """
    rates = tuple(grid)
    if len(rates) == 1:
        return Choice(rates, (), rates[0], False)
    while True:
        missing = tuple(rate for rate in rates if rate not in means)
        known = {rate: means[rate] for rate in rates if rate in means and not math.isnan(means[rate])}
        if missing or not known:
            return Choice(rates, missing, None, False)
        best = max(known, key=lambda rate: known[rate])
        on_edge = best in (rates[0], rates[-1])
        if not on_edge or len(rates) == len(grid) + extensions:
            return Choice(rates, (), best, on_edge)
        rates = extended(rates, upwards=best == rates[-1])


def extended(rates: tuple[float, ...], *, upwards: bool) -> tuple[float, ...]:
    """Add one rate at an end, with the ratio of the two rates there, rounded to three digits.

    >>> extended((3e-4, 1e-3), upwards=True), extended((3e-4, 1e-3), upwards=False)
    ((0.0003, 0.001, 0.00333), (9e-05, 0.0003, 0.001))
    """
    if upwards:
        return (*rates, float(f"{rates[-1] * rates[-1] / rates[-2]:.3g}"))
    return (float(f"{rates[0] * rates[0] / rates[1]:.3g}"), *rates)
