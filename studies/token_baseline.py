"""The Optimal Token Baseline `otb`: an advantage for each token, from one forward pass.

    W_{i,t} = sum_{k <= t} e_{i,k},     e_{i,k} = rho_{i,k}^2 (1 - 2 pi_{i,k} + sum_v pi_{i,k}(v)^2)
    A_{i,t} = r_i - b_t,    b_t = sum_i W_{i,t} r_i / sum_i W_{i,t}, over the responses of the group with a token at t

e is the squared norm of the score at the logits (`estimator.energies`). W sums it up to token t and approximates the
squared norm of the gradient that the token's advantage multiplies.

Source: arXiv 2602.07078. As published, b_t includes o_i's own reward with weight
W_{i,t} / sum_j W_{j,t}. This weight differs between tokens and responses, so that both the scale and the direction of
the gradient are biased. If only one response is left, its weight is 1 and A = 0: the end of a group's longest response
is never trained. The authors' implementation in verl (`compute_optimal_token_baseline_advantage`), which this code
follows, can set b_t = 0 there (`handle_zero_tail`). This code does not: a group of equal rewards would then have a
gradient that depends on the longest response's length.
"""

from __future__ import annotations

import torch
from torch import Tensor


def otb(rewards: Tensor, energies: Tensor, lengths: Tensor) -> Tensor:
    """A [N, T] fp64; exactly 0 past the end of a response and in a group of equal rewards.

    Args:
        rewards: [Q, G], N = Q * G in prompt-major order.
        energies: [N, T] e of each response token; values past the end are not read.
        lengths: [Q, G] response tokens, at most T.

    If all energies up to a token are 0 (pi = 1 for every token), b_t is the plain mean of the responses still going.

    Example, one group, energies of 1 and 3 and lengths 1 and 2, rewards 1 and 0:
        W = [[1, -], [3, 6]], b = [1/4, 0], A = [[3/4, 0], [-1/4, 0]]
    """
    rewards = rewards.to(torch.float64)[..., None]  # [Q, G, 1]
    weights, left = path_energies(energies, lengths)
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, left.to(torch.float64))
    mean = (weights * rewards).sum(1, keepdim=True) / weights.sum(1, keepdim=True)  # NaN where no response is left
    low = rewards.masked_fill(~left, torch.inf).amin(1, keepdim=True)
    high = rewards.masked_fill(~left, -torch.inf).amax(1, keepdim=True)
    baseline = mean.clamp(low, high)  # despite rounding, equal rewards give exactly that reward
    return (rewards - baseline).masked_fill(~left, 0.0).flatten(0, 1)


def path_energies(energies: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """W [Q, G, T] fp64 from e [N, T], 0 past the end, and where a response has a token [Q, G, T]."""
    left = torch.arange(energies.shape[1], device=energies.device) < lengths[..., None]
    own = energies.to(torch.float64).clamp(min=0).view(*lengths.shape, -1)  # rounding can give e < 0
    return own.masked_fill(~left, 0.0).cumsum(-1).masked_fill(~left, 0.0), left
