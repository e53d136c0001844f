"""Baselines that the studies compare, and the package does without: a user's functions, named "studies.baselines:eob".

Arguments as in `oblr_megatron/algo/formulas.py`: rewards, norms_sq w, lengths [Q, G] fp64 and the history -> b [Q, G].
"""

from __future__ import annotations

import torch
from torch import Tensor

from oblr_megatron import baseline
from oblr_megatron.algo.formulas import History
from oblr_megatron.algo.weighting import first_guess, mean_of_others, sum_of_others, weighted_mean

JAMES_STEIN_EPS = 1e-6  # as in the authors' code


@baseline(over="group", divisor="centred_std")
def reinforce_pp_baseline(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """b_i = mean_j r_j: REINFORCE++ with the group's mean, arXiv 2501.03262 (verl's `reinforce_plus_plus_baseline`).

    A is divided by the standard deviation of r - b over the batch (denominator Q G - 1). That depends on o_i and biases
    the direction, less as the batch grows. verl whitens tokens: responses count by their length, and the mean of r - b
    over tokens, which is not 0, is subtracted. Here every response counts once, the mean is 0, and a group of equal
    rewards has A = 0. The published recipe has algo.aggregation = "token_mean".
    """
    return weighted_mean(rewards, torch.ones_like(rewards))


@baseline(over="group", needs_norms=True)
def eob(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """b_i = sum_j w_j r_j / sum_j w_j, o_i included: the "Exact Optimal Baseline" of a public fork of verl.

    The direction is biased, because o_i's weight in b_i varies with w_i; `optimal` leaves o_i out. The fork takes b = 0
    for G = 1, which is `none`. All w zero: the group's mean.
    """
    return weighted_mean(rewards, norms_sq)


@baseline(over="others", prior=True)
def james_stein(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """b_i = (1 - lam_q) b_i^rloo + lam_q m_q: James-Stein shrinkage towards the other prompts' mean m_q, no parameter.

        lam_q = v_q / (v_q + s_q),  v_q = mean_{p != q} var(r_p) / G,  s_q = mean_{p != q} (mean(r_p) - m_q)^2

    var has the denominator G - 1. v and s estimate the variance of a group's mean and of the prompts' means. They and
    m_q come from the other prompts alone, so that b_i is unbiased. The formula is that of the authors' code
    (arXiv 2511.03710, `compute_jspo_outcome_advantage`), which adds 1e-6 to the divisor of lam_q. With one other
    prompt, s_q is 0 and lam_q is 1. A is not 0 in a group of equal rewards.
    """
    means, elsewhere = rewards.mean(-1), first_guess(rewards)  # [Q]
    count = len(rewards) - 1
    within = sum_of_others(rewards.var(-1)) / (rewards.shape[1] * count)
    apart = (means - elsewhere[:, None]).square().fill_diagonal_(0.0)  # [Q, Q], row q holds the prompts p
    pull = (within / (within + apart.sum(-1) / count + JAMES_STEIN_EPS))[:, None]
    return mean_of_others(rewards, torch.ones_like(rewards)) * (1 - pull) + pull * elsewhere[:, None]
