"""Axes with round ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from oblr_megatron.observe.report.history import Array

TINIEST = 1e-280  # smaller spans would become denormal numbers


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis with its ticks. Example: linear_axis(0.0, 0.93, 4) -> Axis(0.0, 1.0, (0.0, 0.25, ...), log=False)."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, values: Array) -> Array:
        """[n] values -> [n] positions in 0..1; values beyond an end are clipped to it."""
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log10(np.maximum(values, self.low)), math.log10(low), math.log10(high)
        return np.clip((values - low) / (high - low), 0.0, 1.0)


def linear_axis(low: float, high: float, intervals: int, whole: bool = False) -> Axis:
    """Ends and ticks at multiples of 1, 2, 2.5 or 5 times a power of ten; `whole` allows integers only."""
    largest = max(abs(low), abs(high))
    if high - low <= 1e-12 * max(largest, TINIEST):  # one value up to rounding
        pad = 0.1 * largest if largest > TINIEST else 0.5
        low, high = low - pad, high + pad
    rough = (high - low) / intervals
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    if whole:
        gap = max(1.0, round(gap))
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return Axis(first * gap, last * gap, tuple(gap * index for index in range(first, last + 1)))


def log_axis(low: float, high: float, intervals: int) -> Axis:
    """Ends at 1, 2 or 5 times a power of ten; ticks at powers of ten, on a short axis also at 2 and 5 times them.

    Values beyond 1e-300 and 1e300 lie on the ends: their powers of ten would be 0 or infinite.
    """
    low, high = (min(max(value, 1e-300), 1e300) for value in (low, high))
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    steps = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    bottom = max(step for step in steps if step <= low * 1.0001)
    top = min(step for step in steps if step >= high * 0.9999 and step > bottom)
    within = [step for step in steps if bottom <= step <= top]
    if len(within) > intervals + 1:
        powers = [10.0**power for power in range(first, last + 1) if bottom <= 10.0**power <= top]
        within = powers[:: math.ceil(len(powers) / (intervals + 1))] if len(powers) > 1 else [bottom, *powers, top]
    return Axis(bottom, top, tuple(within), log=True)


def step_axis(last_step: int) -> Axis:
    """The horizontal axis of every chart: from 0 to the run's last step."""
    nice = linear_axis(0.0, float(max(1, last_step)), 6, whole=True)
    ticks = tuple(tick for tick in nice.ticks if tick <= max(1, last_step))
    return Axis(0.0, float(max(1, last_step)), ticks)
