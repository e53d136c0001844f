"""The baselines' formulas, one function each: (rewards, norms_sq, lengths, options) -> b, all [Q, G] fp64.

Q prompts, G responses each. `baseline.baseline_values` checks the inputs. `config/baselines.py` has each baseline's
facts: what it reads, and the divisor of A = r - b. Baselines that leave o_i out are unbiased; the docstrings of the
others give the bias.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.config.baselines import BaselineName
from oblr_megatron.errors import UserError

BaselineFn = Callable[[Tensor, Tensor, Tensor, AlgoConfig], Tensor]

TINY_WEIGHT = 1e-6  # weights that sum to less than this share of the mean weight carry no information


def none(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b_i = 0: plain REINFORCE (Williams 1992). Unbiased; the other baselines reduce its variance."""
    return torch.zeros_like(rewards)


def group_mean(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b_i = mean_j r_j, o_i included: GRPO without its std, as in Dr. GRPO (arXiv 2503.20783).

    Because b_i includes o_i, E[g] = (1 - 1/G) grad J: the scale is biased, the direction is not. G = 1: A = 0 always.
    `grpo` (DeepSeekMath, arXiv 2402.03300) has the same b and divides A by the group's standard deviation (denominator
    G - 1). That depends on o_i and biases the direction too.
    """
    return weighted_mean(rewards, torch.ones_like(rewards))


def batch_mean(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b = mean of all Q G rewards of the batch, o_i included: E[g] = (1 - 1/(Q G)) grad J, a bias of scale only.

    A also contains differences in difficulty between prompts, and is not 0 in a group of equal rewards. `reinforce_pp`
    (REINFORCE++, arXiv 2501.03262) has the same b and divides A by the standard deviation of the batch's rewards
    (denominator Q G - 1). That depends on o_i, less as the batch grows. Here every response counts once in the mean and
    the deviation; implementations that whiten tokens give long responses more weight. The published method has a KL
    term in the reward; here set algo.kl_coefficient.
    """
    return weighted_mean(rewards.reshape(1, -1), torch.ones_like(rewards).reshape(1, -1)).reshape(rewards.shape)


def rloo(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b_i = mean_{j != i} r_j (arXiv 2402.14740): `optimal` with all norms equal. G = 2: the other's reward."""
    return mean_of_others(rewards, torch.ones_like(rewards))


def median_loo(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b_i = median_{j != i} r_j: `rloo` with a median, which single outliers among graded rewards do not move.

    Unbiased, because o_i is left out. An even number of others: the mean of the two in the middle. G = 2: the other's
    reward.
    """
    own = torch.eye(rewards.shape[1], dtype=torch.bool, device=rewards.device)
    others = rewards[:, None, :].masked_fill(own, torch.nan)  # [Q, G, G], row i without r_i
    return others.nanquantile(0.5, dim=-1)


def opo(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b_i = sum_j L_j r_j / sum_j L_j, o_i included, as published (arXiv 2505.23585): length approximates w.

    The direction is biased, because o_i's weight in b_i varies with its length. All lengths zero: the group's mean.
    """
    return weighted_mean(rewards, lengths)


def length_loo(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b_i = sum_{j != i} L_j^p r_j / sum_{j != i} L_j^p, p = options.length_exponent: an unbiased OPO.

    p = 0 is rloo. If all other lengths are zero: the others' mean.
    """
    return mean_of_others(rewards, lengths**options.length_exponent)


def optimal(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b_i = sum_{j != i} w_j r_j / sum_{j != i} w_j: OBLR-PO's Theorem 7 (arXiv 2511.23310), estimated leave-one-out.

    Degenerate cases: if the others' w are all zero (relative to the batch), b_i is their plain mean. Equal rewards:
    A = 0 exactly. G = 2: b_i is the other's reward, for any w.
    """
    return mean_of_others(rewards, norms_sq)


def rloo_prior(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """`rloo` pulled towards the other prompts' mean, to measure the prior's effect without norms.

    b_i = (sum_{j != i} r_j + lam p) / (G - 1 + lam): `optimal_prior` with all norms equal.

    Raises:
        UserError: Q = 1, where there is no other prompt.
    """
    return _pulled_to_prior(rloo(rewards, norms_sq, lengths, options), rewards, options)


def optimal_prior(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """`optimal` with one more pseudo-response: b_i = (sum w_j r_j + lam wbar p) / (sum w_j + lam wbar), j != i.

    wbar = mean_{j != i} w_j, p = mean reward of the other prompts, lam = options.prior_strength. Dividing by wbar:
    b_i = ((G - 1) b_i^optimal + lam p) / (G - 1 + lam). This pulls the group's own estimate, noisy at small G, towards
    p. It is unbiased: neither part depends on o_i. lam = 0 is `optimal`. A is not 0 in a group of equal rewards.

    Raises:
        UserError: Q = 1, where there is no other prompt.
    """
    return _pulled_to_prior(optimal(rewards, norms_sq, lengths, options), rewards, options)


FORMULAS: dict[BaselineName, BaselineFn] = {
    "none": none,
    "group_mean": group_mean,
    "grpo": group_mean,
    "batch_mean": batch_mean,
    "reinforce_pp": batch_mean,
    "rloo": rloo,
    "rloo_prior": rloo_prior,
    "median_loo": median_loo,
    "opo": opo,
    "length_loo": length_loo,
    "optimal": optimal,
    "optimal_prior": optimal_prior,
}
"""The formula of every baseline with one value for each response; config/baselines.py has their facts."""


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
    total = _sum_of_others(weights)
    batch = total + _sum_of_others(weights.sum(-1))[:, None]
    weighted = total > TINY_WEIGHT * batch / (rows * size - 1)
    mean = torch.where(weighted, _sum_of_others(weights * values) / total, _sum_of_others(values) / (size - 1))
    own = torch.eye(size, dtype=torch.bool, device=values.device)
    spread = values[:, None, :].expand(rows, size, size)  # row i holds v_j
    low, high = spread.masked_fill(own, torch.inf).amin(-1), spread.masked_fill(own, -torch.inf).amax(-1)
    return mean.clamp(low, high)  # as in weighted_mean


def _sum_of_others(values: Tensor) -> Tensor:
    """sum_{j != i} v_j along the last dimension: the sum before i plus the sum after i."""
    before = pad(values, (1, 0))[..., :-1].cumsum(-1)
    after = pad(values.flip(-1), (1, 0))[..., :-1].cumsum(-1).flip(-1)
    return before + after


def _pulled_to_prior(own: Tensor, rewards: Tensor, options: AlgoConfig) -> Tensor:
    """((G - 1) b_i + lam p) / (G - 1 + lam), p = mean reward of the other prompts: the group's b [Q, G] -> [Q, G]."""
    num_prompts, group_size = rewards.shape
    if num_prompts == 1:
        raise UserError(
            "the prior needs the rewards of other prompts, but num_prompts is 1",
            where="algo.baseline",
            fix='set num_prompts to 2 or more, or algo.baseline to "optimal" or "rloo"',
        )
    prior = _sum_of_others(rewards.mean(-1))[:, None] / (num_prompts - 1)  # [Q, 1]
    strength = options.prior_strength
    return own + (strength / (group_size - 1 + strength)) * (prior - own)
