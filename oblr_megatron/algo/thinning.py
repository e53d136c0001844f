"""Thinning of the gradient pass (`algo.keep`): a random part of the responses is computed, each with weight 1 / pi.

    pi_i = min(1, a (0.9 x_i / xbar + 0.1)),    x_i = |c_i| sqrt(e_i / T_i),    sum_i pi_i T_i = keep sum_i T_i

c is the response's coefficient, T its tokens and e = sum_t (1 - mu(o_t))^2 from the sampler's probabilities mu, a free
proxy of the squared norm w. pi ~ |c| sqrt(w / T) has the least noise for a number of tokens (Horvitz and Thompson
1952). xbar is the mean of x over tokens; the share of 0.1 bounds the weights by 10 / keep.

Given the responses, E[kept_i / pi_i] = 1 for any e: the thinned gradient is unbiased for the whole one. Each response
is drawn for itself, so that products of two responses keep their expectation, and with them the estimates of signal
and noise. The extra noise is sum_i (1 / pi_i - 1) c_i^2 w_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

UNIFORM = 0.1  # part of pi that is the same for all responses


def thinned(coefficients: Tensor, energies: Tensor, tokens: Tensor, keep: float, seed: int) -> Tensor:
    """1 / pi of the responses that are kept, 0 for the others: [Q, G] fp64, the same on every rank.

    Args:
        coefficients: c [Q, G] of the step's responses.
        energies: e [Q, G], `sampled_energies`.
        tokens: T [Q, G], tokens of prompt and response, above 0.
        keep: expected share of the tokens, above 0.
        seed: of the draw.
    """
    probabilities = inclusion(coefficients.abs() * (energies / tokens).sqrt(), tokens, keep)
    drawn = torch.rand(probabilities.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(drawn < probabilities, 1 / probabilities, 0.0)


def inclusion(values: Tensor, tokens: Tensor, keep: float) -> Tensor:
    """pi of responses with values x and T tokens, all [Q, G]; at least UNIFORM * keep.

    Example: x = [[3.0, 1.0]], T = [[10, 10]], keep = 0.5 -> [[0.725, 0.275]]
    """
    tokens = tokens.to(torch.float64)
    total = float((values * tokens).sum())
    shares = (1 - UNIFORM) * values * float(tokens.sum()) / total + UNIFORM if total > 0 else torch.ones_like(values)
    certain = torch.zeros_like(shares, dtype=torch.bool)  # pi = 1
    while True:
        left = keep * float(tokens.sum()) - float(tokens[certain].sum())
        scale = left / float((shares * tokens)[~certain].sum().clamp(min=1e-300))
        above = ~certain & (scale * shares >= 1)
        if not bool(above.any()):
            return torch.where(certain, 1.0, scale * shares)
        certain |= above


def sampled_energies(logprobs: Sequence[Sequence[float]]) -> Tensor:
    """e [N] = sum_t (1 - mu(o_t))^2 of N responses, from log mu of the tokens that the policy wrote, 0 for others."""
    rows = [torch.tensor(row, dtype=torch.float64) for row in logprobs]
    return torch.stack([(1 - row.exp()).square().sum() for row in rows])
