"""The baselines' formulas, one function each: (rewards, norms_sq, lengths, options, history) -> b, all [Q, G] fp64.

Q prompts, G responses each; `history` is what earlier steps tell (algo/pools.py). `baseline.baseline_values` checks the
inputs. `config/baselines.py` has each baseline's facts: what it reads, and the divisor of A = r - b. Baselines that
leave o_i out are unbiased; the docstrings of the others give the bias. Those that read the mean of the other prompts
raise a UserError if Q = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oblr_megatron.algo.weighting import first_guess, mean_of_others, sum_of_others, weighted_mean
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.errors import UserError

JAMES_STEIN_EPS = 1e-6  # as in the authors' code


@dataclass(frozen=True, slots=True)
class History:
    """What earlier steps tell about Q prompts.

    Example: History(expected=tensor([0.31, nan]), pull=0.9)
    """

    expected: Tensor | None = None  # b_t [Q] fp64; NaN where no earlier step tells anything; None: for no prompt
    pull: float = 0.0  # alpha of `optimal_pooled`


NO_HISTORY = History()
BaselineFn = Callable[[Tensor, Tensor, Tensor, AlgoConfig, History], Tensor]


def none(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """b_i = 0: plain REINFORCE (Williams 1992). Unbiased; the other baselines reduce its variance."""
    return torch.zeros_like(rewards)


def group_mean(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """b_i = mean_j r_j, o_i included: GRPO without its std, as in Dr. GRPO (arXiv 2503.20783).

    Because b_i includes o_i, E[g] = (1 - 1/G) grad J: the scale is biased, the direction is not. G = 1 is refused,
    because A would be 0; verl takes b = 0 there, which is `none`.
    `grpo` (DeepSeekMath, arXiv 2402.03300) has the same b and divides A by the group's standard deviation (denominator
    G - 1). That depends on o_i and biases the direction too.

    `reinforce_pp_baseline` (REINFORCE++ with the group's mean, arXiv 2501.03262; verl's
    `reinforce_plus_plus_baseline`) has the same b and divides A by the standard deviation of r - b over the batch
    (denominator Q G - 1). That depends on o_i and biases the direction, less as the batch grows. verl whitens tokens:
    responses count by their length, and the mean of r - b over tokens, which is not 0, is subtracted. Here every
    response counts once, the mean is 0, and a group of equal rewards has A = 0.
    """
    return weighted_mean(rewards, torch.ones_like(rewards))


def batch_mean(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """b = mean of all Q G rewards of the batch, o_i included: E[g] = (1 - 1/(Q G)) grad J, a bias of scale only.

    A also contains differences in difficulty between prompts, and is not 0 in a group of equal rewards. `reinforce_pp`
    (REINFORCE++, arXiv 2501.03262) has the same b and divides A by the standard deviation of the batch's rewards
    (denominator Q G - 1). That depends on o_i, less as the batch grows. Here every response counts once in the mean and
    the deviation; implementations that whiten tokens give long responses more weight. The published method has a KL
    term in the reward; here set algo.kl_coefficient.
    """
    return weighted_mean(rewards.reshape(1, -1), torch.ones_like(rewards).reshape(1, -1)).reshape(rewards.shape)


def rloo(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """b_i = mean_{j != i} r_j (arXiv 2402.14740): `optimal` with all norms equal. G = 2: the other's reward."""
    return mean_of_others(rewards, torch.ones_like(rewards))


def median_loo(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """b_i = median_{j != i} r_j: `rloo` with a median, which single outliers among graded rewards do not move.

    Unbiased, because o_i is left out. An even number of others: the mean of the two in the middle. G = 2: the other's
    reward.
    """
    own = torch.eye(rewards.shape[1], dtype=torch.bool, device=rewards.device)
    others = rewards[:, None, :].masked_fill(own, torch.nan)  # [Q, G, G], row i without r_i
    return others.nanquantile(0.5, dim=-1)


def opo(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """b_i = sum_j L_j r_j / sum_j L_j, o_i included, as published (arXiv 2505.23585): length approximates w.

    The direction is biased, because o_i's weight in b_i varies with its length. All lengths zero: the group's mean.
    """
    return weighted_mean(rewards, lengths)


def eob(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """b_i = sum_j w_j r_j / sum_j w_j, o_i included: the "Exact Optimal Baseline" of a public fork of verl.

    The direction is biased, because o_i's weight in b_i varies with w_i; `optimal` leaves o_i out. The fork takes b = 0
    for G = 1, which is `none`. All w zero: the group's mean.
    """
    return weighted_mean(rewards, norms_sq)


def length_loo(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """b_i = sum_{j != i} L_j^p r_j / sum_{j != i} L_j^p, p = options.length_exponent: an unbiased OPO.

    p = 0 is rloo. If all other lengths are zero: the others' mean.
    """
    return mean_of_others(rewards, lengths**options.length_exponent)


def optimal(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """b_i = sum_{j != i} w_j r_j / sum_{j != i} w_j: OBLR-PO's Theorem 7 (arXiv 2511.23310), estimated leave-one-out.

    Degenerate cases: if the others' w are all zero (relative to the batch), b_i is their plain mean. Equal rewards:
    A = 0 exactly. G = 2: b_i is the other's reward, for any w.
    """
    return mean_of_others(rewards, norms_sq)


def rloo_prior(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """`rloo` pulled towards the other prompts' mean, to measure the prior's effect without norms.

    b_i = (sum_{j != i} r_j + lam p) / (G - 1 + lam): `optimal_prior` with all norms equal.
    """
    return _pulled_to_prior(rloo(rewards, norms_sq, lengths, options, history), rewards, options)


def james_stein(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """b_i = (1 - lam_q) b_i^rloo + lam_q m_q: James-Stein shrinkage towards the other prompts' mean m_q, no parameter.

        lam_q = v_q / (v_q + s_q),  v_q = mean_{p != q} var(r_p) / G,  s_q = mean_{p != q} (mean(r_p) - m_q)^2

    var has the denominator G - 1. v and s estimate the variance of a group's mean and of the prompts' means. They and
    m_q come from the other prompts alone, so that b_i is unbiased. The formula is that of the authors' code
    (arXiv 2511.03710, `compute_jspo_outcome_advantage`), which adds 1e-6 to the divisor of lam_q. With one other
    prompt, s_q is 0 and lam_q is 1. A is not 0 in a group of equal rewards.
    """
    means, elsewhere = rewards.mean(-1), _mean_of_other_prompts(rewards)  # [Q]
    count = len(rewards) - 1
    within = sum_of_others(rewards.var(-1)) / (rewards.shape[1] * count)
    apart = (means - elsewhere[:, None]).square().fill_diagonal_(0.0)  # [Q, Q], row q holds the prompts p
    pull = (within / (within + apart.sum(-1) / count + JAMES_STEIN_EPS))[:, None]
    return rloo(rewards, norms_sq, lengths, options, history) * (1 - pull) + pull * elsewhere[:, None]


def optimal_prior(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """`optimal` with one more pseudo-response: b_i = (sum w_j r_j + lam wbar p) / (sum w_j + lam wbar), j != i.

    wbar = mean_{j != i} w_j, p = mean reward of the other prompts, lam = options.prior_strength. Dividing by wbar:
    b_i = ((G - 1) b_i^optimal + lam p) / (G - 1 + lam). This pulls the group's own estimate, noisy at small G, towards
    p. It is unbiased: neither part depends on o_i. lam = 0 is `optimal`. A is not 0 in a group of equal rewards.
    """
    return _pulled_to_prior(optimal(rewards, norms_sq, lengths, options, history), rewards, options)


def pooled(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """b_i = b_t, predicted from earlier steps alone (algo/pools.py): unbiased at any G >= 1, for any w.

    `pooled` weights earlier rewards with w, `pooled_mean` equally. No norm of this step is read, so the coefficients
    are known before the gradient. A prompt without any history: the mean reward of the other prompts, or 0 if Q = 1.
    """
    known = history.expected
    if known is None:
        known = rewards.new_full(rewards.shape[:1], torch.nan)
    return torch.where(known.isnan(), first_guess(rewards), known)[:, None].expand_as(rewards)


def optimal_pooled(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig, history: History) -> Tensor:
    """`optimal` pulled towards `pooled`: b_i = b_i^optimal + alpha (b_t - b_i^optimal), alpha from earlier steps.

    alpha is the least-squares weight of `pools.Pools`, 0 in the first step. Unbiased: b_t and alpha depend on no sample
    of this step. A is not 0 in a group of equal rewards.
    """
    own = optimal(rewards, norms_sq, lengths, options, history)
    return own + history.pull * (pooled(rewards, norms_sq, lengths, options, history) - own)


FORMULAS: dict[str, BaselineFn] = {
    "none": none,
    "group_mean": group_mean,
    "grpo": group_mean,
    "batch_mean": batch_mean,
    "reinforce_pp": batch_mean,
    "reinforce_pp_baseline": group_mean,
    "rloo": rloo,
    "rloo_prior": rloo_prior,
    "james_stein": james_stein,
    "median_loo": median_loo,
    "opo": opo,
    "length_loo": length_loo,
    "eob": eob,
    "optimal": optimal,
    "optimal_prior": optimal_prior,
    "pooled_mean": pooled,
    "pooled": pooled,
    "optimal_pooled": optimal_pooled,
}
"""The formula of every baseline with one value for each response; config/baselines.py has their facts."""


def _pulled_to_prior(own: Tensor, rewards: Tensor, options: AlgoConfig) -> Tensor:
    """((G - 1) b_i + lam p) / (G - 1 + lam), p = mean reward of the other prompts: the group's b [Q, G] -> [Q, G]."""
    prior, strength = _mean_of_other_prompts(rewards)[:, None], options.prior_strength
    return own + (strength / (rewards.shape[1] - 1 + strength)) * (prior - own)


def _mean_of_other_prompts(rewards: Tensor) -> Tensor:
    """Mean reward of the other prompts: [Q, G] -> [Q]."""
    if len(rewards) == 1:
        raise UserError(
            "the prior needs the rewards of other prompts, but num_prompts is 1",
            where="algo.baseline",
            fix='set num_prompts to 2 or more, or algo.baseline to "optimal" or "rloo"',
        )
    return first_guess(rewards)
