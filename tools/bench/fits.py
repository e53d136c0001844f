"""Fit a power law to costs, by least squares on logarithms.

cost = c * G^g * T^t * P^p      ->      log cost = log c + g log G + t log T + p log P
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted power law.

    Example, from 7 points of a pass that costs 2 us per sample, token and million parameters:
        Fit(exponents={"samples": 1.0, "tokens": 1.0, "parameters": 1.0}, factor=2e-12, r_squared=1.0, points=7)
    """

    exponents: dict[str, float]  # by variable; NaN for a variable that does not vary
    factor: float  # c
    r_squared: float  # of the logarithms; NaN if the cost does not vary
    points: int  # number of costs above 0; only these have a logarithm


def power_law(costs: Sequence[float], variables: Mapping[str, Sequence[float]]) -> Fit:
    """Fit costs [n] as a power law of the variables, each [n] and positive. Costs of 0 or less are skipped.

    All results are NaN unless there are more points than unknowns, since such a fit passes through its points.
    """
    kept = [index for index, cost in enumerate(costs) if cost > 0]
    logs = {name: [math.log(values[index]) for index in kept] for name, values in variables.items()}
    varying = [name for name, values in logs.items() if len(set(values)) > 1]
    if len(kept) <= len(varying) + 1:
        return Fit(dict.fromkeys(variables, math.nan), math.nan, math.nan, len(kept))
    target = torch.tensor([math.log(costs[index]) for index in kept], dtype=torch.float64)  # [n]
    columns = [[1.0] * len(kept), *(logs[name] for name in varying)]
    design = torch.tensor(columns, dtype=torch.float64).T  # [n, 1 + varying]
    solution = torch.linalg.lstsq(design, target[:, None]).solution[:, 0]
    residual = float((target - design @ solution).square().sum())
    spread = float((target - target.mean()).square().sum())
    found = dict(zip(varying, solution[1:].tolist(), strict=True))
    return Fit(
        exponents={name: found.get(name, math.nan) for name in variables},
        factor=math.exp(solution[0]),
        r_squared=1 - residual / spread if spread else math.nan,
        points=len(kept),
    )
