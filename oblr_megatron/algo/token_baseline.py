"""Optimal Token Baselines (OTB, arXiv 2602.07078): an advantage for each token, from one forward pass.

    W_{i,t} = sum_{k <= t} e_{i,k},     e_{i,k} = rho_{i,k}^2 (1 - 2 pi_{i,k} + sum_v pi_{i,k}(v)^2)
    b_t     = sum_i W_{i,t} r_i / sum_i W_{i,t}     over the responses of the group that still have a token at t
    A_{i,t} = r_i - b_t

e is the squared norm of the score at the logits (`vocab_parallel_energy`), and W, the energy of the path so far, stands
for the norm of the gradient that the token's advantage multiplies.

As published b_t holds o_i's own reward. Its share W_{i,t} / sum_j W_{j,t} is taken from the gradient, and since the
share differs from token to token and from response to response, the gradient is turned as well as shortened. In the
tail, where one response is left, the share is 1 and A = 0: the end of the longest response of a group is never taught.
verl, whose authors' implementation this follows (`compute_optimal_token_baseline_advantage`), can set b_t = 0 there
(`handle_zero_tail`); that is not done here, as a group of equal rewards would then push by the length of its longest
response.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_advantages(rewards: Tensor, energies: Tensor, lengths: Tensor) -> Tensor:
    """A [N, T] fp64, 0 past the end of a response and, exactly, in a group of equal rewards.

    Energies that are all 0 up to a token (every choice was certain) give the plain mean of the responses that are left.

    Args:
        rewards: [Q, G], N = Q * G in prompt-major order.
        energies: [N, T] e of each response token; what stands past the end is not read.
        lengths: [Q, G] response tokens, at most T.

    Example, one group, energies of 1 and 3 and lengths 1 and 2, rewards 1 and 0:
        W = [[1, -], [3, 6]], b = [1/4, 0], A = [[3/4, 0], [-1/4, 0]]
    """
    num_prompts, group_size = rewards.shape
    rewards = rewards.to(torch.float64)[..., None]  # [Q, G, 1]
    steps = torch.arange(energies.shape[1], device=energies.device)
    left = steps < lengths[..., None]  # [Q, G, T]
    energies = energies.to(torch.float64).clamp(min=0).view(num_prompts, group_size, -1)  # rounding may go below 0
    weights = energies.masked_fill(~left, 0.0).cumsum(-1).masked_fill(~left, 0.0)
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, left.to(torch.float64))
    mean = (weights * rewards).sum(1, keepdim=True) / weights.sum(1, keepdim=True)  # NaN where no response is left
    low = rewards.masked_fill(~left, torch.inf).amin(1, keepdim=True)
    high = rewards.masked_fill(~left, -torch.inf).amax(1, keepdim=True)
    baseline = mean.clamp(low, high)  # rounding may not leave the bounds: equal rewards give themselves
    return (rewards - baseline).masked_fill(~left, 0.0).flatten(0, 1)
