"""Weights of responses: means of a group's rewards, over all or over the others of each; norm tempering."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

TINY_WEIGHT = 1e-6  # weights that sum to less than this share of the mean weight carry no information
LARGEST_FACTOR = 100.0  # of tempering, for norms close to 0


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """The group's weighted mean, own entry included: [Q, G] -> [Q, G]; the plain mean if the weights sum to 0."""
    weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, torch.ones_like(weights))
    mean = (weights * values).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    return mean.clamp(low, high).expand_as(values)  # despite rounding, equal values give exactly that value


def mean_of_others(values: Tensor, weights: Tensor) -> Tensor:
    """m_i = sum_{j != i} w_j v_j / sum_{j != i} w_j: [Q, G] -> [Q, G], min v <= m_i <= max v over j != i.

    Sums run over the others directly: S0 - w_i would lose all digits if w_i dominates. m_i is the others' plain mean if
    their weights sum to at most TINY_WEIGHT times the mean weight of the batch. That mean also leaves o_i out, so that
    m_i depends on neither v_i nor w_i.
    """
    rows, size = values.shape
    total = sum_of_others(weights)
    batch = total + sum_of_others(weights.sum(-1))[:, None]
    weighted = total > TINY_WEIGHT * batch / (rows * size - 1)
    mean = torch.where(weighted, sum_of_others(weights * values) / total, sum_of_others(values) / (size - 1))
    return mean.clamp(smallest_of_others(values), -smallest_of_others(-values))  # as in weighted_mean


def first_guess(rewards: Tensor) -> Tensor:
    """The mean reward of the other prompts, for a prompt without history: [Q, G] -> [Q]; 0 if Q = 1."""
    return sum_of_others(rewards.mean(-1)) / max(1, len(rewards) - 1)


def smallest_of_others(values: Tensor) -> Tensor:
    """min_{j != i} v_j along the last dimension, of two entries or more."""
    two, at = values.topk(2, dim=-1, largest=False)
    return two[..., :1].expand_as(values).scatter(-1, at[..., :1], two[..., 1:])


def sum_of_others(values: Tensor) -> Tensor:
    """sum_{j != i} v_j along the last dimension: the sum before i plus the sum after i."""
    before = pad(values, (1, 0))[..., :-1].cumsum(-1)
    after = pad(values.flip(-1), (1, 0))[..., :-1].cumsum(-1).flip(-1)
    return before + after


def tempering(norms_sq: Tensor, mean_norm: float, power: float) -> Tensor:
    """Norm tempering: the factor (wbar / w)^gamma of each response's coefficient, at most LARGEST_FACTOR.

    Few responses with large norms hold most of the gradient's energy sum A^2 w. The factor weights them down, so that
    the gradient turns little and its noise falls more. E[f s] = Cov(f, s) is not 0: the gradient is biased.

    Args:
        norms_sq: w [Q, G] fp64, finite and not negative.
        mean_norm: wbar, the mean of w over earlier steps; 0 before the first: every factor is 1.
        power: gamma; 0: every factor is 1.

    Example: tempering(tensor([[16.0, 1.0]]), 1.0, 0.25) -> [[0.5, 1.0]]
    """
    if power == 0 or mean_norm <= 0:
        return torch.ones_like(norms_sq)
    return (mean_norm / norms_sq.clamp(min=1e-12 * mean_norm)).pow(power).clamp(max=LARGEST_FACTOR)
