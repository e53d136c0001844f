"""Which learning rate an arm is judged at: the best of a grid, which grows where the best lies on its edge. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a sweep stands. Example: Choice(rates=(3e-4, 1e-3), missing=(), best=1e-3, on_edge=True)."""

    rates: tuple[float, ...]  # rising; the grid with its extensions
    missing: tuple[float, ...]  # those that have no figure yet
    best: float | None  # None while something is missing, or where every rate failed
    on_edge: bool  # the best one is still the largest or smallest, and the grid may not grow further


def choose(grid: Sequence[float], extensions: int, means: Mapping[float, float]) -> Choice:
    """What to run next, or the rate with the largest mean area under the curve.

    Args:
        grid: rates, rising; one alone is taken as it is.
        extensions: how often the grid may grow by one rate.
        means: of the rates tried, over the sweep's seeds; NaN for one with a run that failed, which is never the best.
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
    """One rate more, by the ratio of the two at that end, in three digits.

    >>> extended((3e-4, 1e-3), upwards=True), extended((3e-4, 1e-3), upwards=False)
    ((0.0003, 0.001, 0.00333), (9e-05, 0.0003, 0.001))
    """
    if upwards:
        return (*rates, float(f"{rates[-1] * rates[-1] / rates[-2]:.3g}"))
    return (float(f"{rates[0] * rates[0] / rates[1]:.3g}"), *rates)
