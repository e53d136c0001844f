"""Which source of a mixture gives the next prompt: shares exact to less than one prompt, at any time, without chance.

The rule is Balinski and Young's quota method (1975), which apportions seats one by one. After t prompts a source of
share w has given less than w t + 1 and more than w t - 1; of the sources that may give another one without exceeding
that, the one with the smallest (taken + 1) / w does.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The same proportions as whole numbers, exactly. [0.5, 0.25] -> [2, 1]"""
    exact = [Fraction(weight) for weight in weights]
    common = lcm(*(weight.denominator for weight in exact))
    return [int(weight * common) for weight in exact]


def next_source(taken: Sequence[int], weights: Sequence[int]) -> int:
    """Position of the source that gives the next prompt.

    Args:
        taken: prompts each source has given so far.
        weights: positive whole numbers.

    Example: weights [3, 1] give the order 0, 0, 0, 1, 0, 0, 0, 1, ...
    """
    total, given = sum(weights), sum(taken) + 1
    eligible = [source for source, weight in enumerate(weights) if taken[source] * total < weight * given]
    return min(eligible, key=lambda source: Fraction(taken[source] + 1, weights[source]))
