"""Baselines b_i and advantages A_i = r_i - b_i by name, in fp64. formulas.py has the formulas.

    g = 1/(Q G) sum_q sum_i A_i s_i,    s_i = grad_theta log pi(o_i),    w_i = ||s_i||^2

E[s_i] = 0, so g is unbiased for every b_i that is independent of o_i, such as the leave-one-out baselines. The b with
the least variance is E[w r] / E[w] (OBLR-PO, arXiv 2511.23310, Theorem 7). `optimal` estimates it from the other
responses of the group.

Shapes: rewards r, norms_sq w, lengths (tokens) and every result are [Q, G]: Q prompts, G responses each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oblr_megatron.algo.formulas import FORMULAS, NO_HISTORY, History
from oblr_megatron.algo.user_baseline import user_values
from oblr_megatron.algo.weighting import mean_of_others
from oblr_megatron.config.baselines import facts_of
from oblr_megatron.errors import RunError, UserError

STD_EPS = 1e-6  # added to the standard deviation that divides A


def baseline_values(
    name: str,
    rewards: Tensor,
    norms_sq: Tensor,
    lengths: Tensor,
    history: History = NO_HISTORY,
) -> Tensor:
    """b [Q, G] fp64 of a baseline: a key of FORMULAS, or a user's "package.module:function".

    Checks the inputs and replaces norms that are not finite.

    w is read only by baselines with `needs_norms`, and `history` by those with a `pool`.

    Raises:
        UserError: a reward is not finite, or a baseline of the group has G = 1.
        RunError: a user's function fails, which passed `check_baseline` before the run.
    """
    rewards, lengths = rewards.to(torch.float64), lengths.to(torch.float64)
    shapes = [tuple(tensor.shape) for tensor in (rewards, norms_sq, lengths)]
    assert rewards.dim() == 2 and len(set(shapes)) == 1, f"rewards, norms_sq, lengths must be [Q, G], not {shapes}"
    if not rewards.isfinite().all():
        raise UserError("a reward is NaN or infinite", where="reward", fix="return finite rewards")
    if facts_of(name).needs_group and rewards.shape[1] == 1:
        raise UserError(
            f"baseline {name!r} needs the other responses of the group, and group_size is 1",
            where="group_size",
            fix='set group_size to 2 or more, or algo.baseline to "pooled" or "none"',
        )
    weights = sanitize_norms(norms_sq)
    if name in FORMULAS:
        return FORMULAS[name](rewards, weights, lengths, history)
    try:
        return user_values(name, rewards, weights, lengths, history)
    except UserError as error:  # the input was checked before the run; perhaps one rank alone has it, and prints it
        raise RunError(str(error)) from error


def advantages(name: str, rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History = NO_HISTORY) -> Tensor:
    """A = (r - b) / divisor [Q, G] fp64, 0 where the divisor is a deviation of almost 0.

    Arguments and errors are those of `baseline_values`.
    """
    rewards = rewards.to(torch.float64)
    centred = rewards - baseline_values(name, rewards, norms_sq, lengths, history)
    divisors = {"group_std": rewards, "batch_std": rewards.reshape(1, -1), "centred_std": centred.reshape(1, -1)}
    spread = divisors.get(facts_of(name).divisor)
    if spread is not None and spread.shape[1] > 1:  # one reward has no std: A stays r - b
        std = spread.std(dim=-1, keepdim=True)
        centred = torch.where(std > STD_EPS, centred / (std + STD_EPS), 0.0)  # r - b need not be 0 there
    return centred


def active_groups(name: str, rewards: Tensor) -> Tensor:
    """The groups that need forward and backward passes: rewards [Q, G] -> bool [Q].

    A group of equal rewards has A = 0 exactly, for any norms, unless the baseline looks beyond the group.
    """
    if not facts_of(name).zero_on_equal:
        return torch.ones(rewards.shape[0], dtype=torch.bool, device=rewards.device)
    return mixed_groups(rewards)


def mixed_groups(rewards: Tensor) -> Tensor:
    """The groups with unequal rewards: [Q, G] -> bool [Q]."""
    return rewards.amax(-1) != rewards.amin(-1)


def sanitize_norms(norms_sq: Tensor) -> Tensor:
    """Replace every w that is not a finite number >= 0. Returns w [Q, G] fp64.

    The replacement is the median of the group's valid w; else of the batch's; else 1. A non-finite norm is a broken
    gradient, so that a run with more than a few should stop. A replacement is a median that may include w_i, so b_i
    then depends on sample i. That biases the gradient in this step.

    Example: [[1, 3, nan, 2]] -> [[1, 3, 2, 2]]
    """
    norms_sq = norms_sq.to(torch.float64)
    bad = ~norms_sq.isfinite() | (norms_sq < 0)
    if not bad.any():
        return norms_sq
    known = norms_sq.masked_fill(bad, float("nan"))
    batch = known.flatten().nanquantile(0.5).nan_to_num(nan=1.0)
    group = known.nanquantile(0.5, dim=-1, keepdim=True)  # [Q, 1]
    return torch.where(bad, torch.where(group.isnan(), batch, group), norms_sq)


def variance_ratio_vs_rloo(rewards: Tensor, norms_sq: Tensor, baseline: Tensor) -> float:
    """sum (r - b)^2 w / sum (r - b_rloo)^2 w over the batch, all inputs [Q, G]. Below 1 the baseline beats rloo's.

    This estimates the ratio of E||A s||^2, the second moment of one response's term of the gradient. It ignores the
    squared mean ||grad J||^2 (equal for all unbiased baselines), importance ratios, and any scale on A (grpo's std). It
    also ignores the covariance between responses that share a baseline, and cannot rank baselines that differ by less.

    NaN if rloo's sum is 0 (every group has equal rewards) or G = 1. Inputs are fp64, norms finite.
    """
    if rewards.shape[1] == 1:
        return float("nan")
    rloo = mean_of_others(rewards, torch.ones_like(rewards))
    ours, of_rloo = (((rewards - b) ** 2 * norms_sq).sum() for b in (baseline, rloo))
    return float(ours / of_rloo) if of_rloo > 0 else float("nan")
