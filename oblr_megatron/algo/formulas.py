"""The baselines' formulas, one function each: (rewards, norms_sq, lengths, history) -> b, all [Q, G] fp64.

Q prompts, G responses each; `history` is what earlier steps tell (algo/pools.py). `baseline.baseline_values` checks the
inputs. `config/baselines.py` has each baseline's facts: what it reads, and the divisor of A = r - b. Baselines that
leave o_i out are unbiased; the docstrings of the others give the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oblr_megatron.algo.weighting import first_guess, mean_of_others, weighted_mean


@dataclass(frozen=True, slots=True)
class History:
    """Knowledge about Q prompts from earlier steps.

    Example: History(expected=tensor([0.31, nan]), pull=0.9)
    """

    expected: Tensor | None = None  # b_t [Q] fp64; NaN where no earlier step tells anything; None: for no prompt
    pull: float = 0.0  # alpha of `optimal_pooled`
    running_mean_norm: float = 0.0  # running mean of w over some ten earlier steps; 0 before the first


NO_HISTORY = History()
BaselineFn = Callable[[Tensor, Tensor, Tensor, History], Tensor]


def none(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """b_i = 0: plain REINFORCE (Williams 1992). Unbiased; the other baselines reduce its variance."""
    return torch.zeros_like(rewards)


def group_mean(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """b_i = mean_j r_j, o_i included: GRPO without its std, as in Dr. GRPO (arXiv 2503.20783).

    Because b_i includes o_i, E[g] = (1 - 1/G) grad J: the scale is biased, the direction is not. G = 1 is refused,
    because A would be 0; verl takes b = 0 there, which is `none`.
    `grpo` (DeepSeekMath, arXiv 2402.03300) has the same b and divides A by the group's standard deviation (denominator
    G - 1). That depends on o_i and biases the direction too.
    """
    return weighted_mean(rewards, torch.ones_like(rewards))


def batch_mean(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """b = mean of all Q G rewards of the batch, o_i included: E[g] = (1 - 1/(Q G)) grad J, a bias of scale only.

    A also contains differences in difficulty between prompts, and is not 0 in a group of equal rewards. `reinforce_pp`
    (REINFORCE++, arXiv 2501.03262) has the same b and divides A by the standard deviation of the batch's rewards
    (denominator Q G - 1). That depends on o_i, less as the batch grows. Here every response counts once in the mean and
    the deviation; implementations that whiten tokens give long responses more weight. The published method has a KL
    term in the reward; here set algo.kl_coefficient.
    """
    return weighted_mean(rewards.reshape(1, -1), torch.ones_like(rewards).reshape(1, -1)).reshape(rewards.shape)


def rloo(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """b_i = mean_{j != i} r_j (arXiv 2402.14740): `optimal` with all norms equal. G = 2: the other's reward."""
    return mean_of_others(rewards, torch.ones_like(rewards))


def opo(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """b_i = sum_j L_j r_j / sum_j L_j, o_i included, as published (arXiv 2505.23585): length approximates w.

    The direction is biased, because o_i's weight in b_i varies with its length. All lengths zero: the group's mean.
    """
    return weighted_mean(rewards, lengths)


def optimal(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """b_i = sum_{j != i} w_j r_j / sum_{j != i} w_j: OBLR-PO's Theorem 7 (arXiv 2511.23310), estimated leave-one-out.

    Degenerate cases: if the others' w are all zero (relative to the batch), b_i is their plain mean. Equal rewards:
    A = 0 exactly. G = 2: b_i is the other's reward, for any w.
    """
    return mean_of_others(rewards, norms_sq)


def pooled(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """b_i = b_t, predicted from earlier steps alone (algo/pools.py): unbiased at any G >= 1, for any w.

    `pooled` weights earlier rewards with w, `pooled_mean` equally. No norm of this step is read, so the coefficients
    are known before the gradient. A prompt without any history: the mean reward of the other prompts, or 0 if Q = 1.
    """
    known = history.expected
    if known is None:
        known = rewards.new_full(rewards.shape[:1], torch.nan)
    return torch.where(known.isnan(), first_guess(rewards), known)[:, None].expand_as(rewards)


def optimal_pooled(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """`optimal` pulled towards `pooled`: b_i = b_i^optimal + alpha (b_t - b_i^optimal), alpha from earlier steps.

    alpha is the least-squares weight of `pools.Pools`, 0 in the first step. Unbiased: b_t and alpha depend on no sample
    of this step. A is not 0 in a group of equal rewards.
    """
    own = optimal(rewards, norms_sq, lengths, history)
    return own + history.pull * (pooled(rewards, norms_sq, lengths, history) - own)


FORMULAS: dict[str, BaselineFn] = {
    "none": none,
    "group_mean": group_mean,
    "grpo": group_mean,
    "batch_mean": batch_mean,
    "reinforce_pp": batch_mean,
    "rloo": rloo,
    "opo": opo,
    "optimal": optimal,
    "pooled_mean": pooled,
    "pooled": pooled,
    "optimal_pooled": optimal_pooled,
}
"""The formula of every baseline with one value for each response; config/baselines.py has their facts."""
