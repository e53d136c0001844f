"""Baselines b_i and advantages A_i = r_i - b_i by name, fp64; the formulas are in formulas.py.

    g = 1/(Q G) sum_q sum_i A_i s_i,    s_i = grad_theta log pi(o_i),    w_i = ||s_i||^2

E[s_i] = 0, so g stays unbiased for every b_i that does not look at o_i itself: the leave-one-out ones here. OBLR-PO
(arXiv 2511.23310, Theorem 7) gives the b that minimises the variance, E[w r] / E[w]; `optimal` estimates it from the
other responses of the group.

Shapes: rewards, norms_sq, lengths and every result are [Q, G]: Q prompts, G responses each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oblr_megatron.algo.formulas import FORMULAS, mean_of_others
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.config.baselines import BASELINES, BaselineName
from oblr_megatron.errors import UserError

STD_EPS = 1e-6  # added to the standard deviation that divides A


def baseline_values(
    name: BaselineName, rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig
) -> Tensor:
    """b [Q, G] fp64 of the named baseline, the inputs checked and norms that are no numbers replaced.

    Args:
        name: a baseline that is one number a response, a key of FORMULAS.
        rewards: [Q, G].
        norms_sq: [Q, G] squared score norms w; read only where `needs_norms`.
        lengths: [Q, G] response tokens.
        options: prior_strength and length_exponent are read.

    Raises:
        UserError: a reward is not finite, or a leave-one-out baseline is asked for with G = 1.
    """
    rewards, lengths = rewards.to(torch.float64), lengths.to(torch.float64)
    shapes = [tuple(tensor.shape) for tensor in (rewards, norms_sq, lengths)]
    assert rewards.dim() == 2 and len(set(shapes)) == 1, f"rewards, norms_sq, lengths must be [Q, G], not {shapes}"
    if not rewards.isfinite().all():
        raise UserError("a reward is not a finite number", where="reward", fix="return finite rewards")
    if BASELINES[name].leave_one_out and rewards.shape[1] == 1:
        raise UserError(
            f"baseline {name!r} needs the other responses of the group, and group_size is 1",
            where="group_size",
            fix='set group_size to 2 or more, or algo.baseline to "none"',
        )
    weights, _ = sanitize_norms(norms_sq)
    return FORMULAS[name](rewards, weights, lengths, options)


def advantages(name: BaselineName, rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """A = (r - b) / divisor [Q, G] fp64. Arguments and errors as in `baseline_values`."""
    rewards = rewards.to(torch.float64)
    centred = rewards - baseline_values(name, rewards, norms_sq, lengths, options)
    match BASELINES[name].divisor:
        case "group_std":
            spread = rewards  # [Q, G]
        case "batch_std":
            spread = rewards.reshape(1, -1)
        case "one":
            return centred
    if spread.shape[1] == 1:  # a single response has no std, and A = 0
        return centred
    return centred / (spread.std(dim=-1, keepdim=True) + STD_EPS)


def active_groups(name: BaselineName, rewards: Tensor) -> Tensor:
    """Which groups need their forward and backward passes: rewards [Q, G] -> bool [Q].

    A group of equal rewards has A = 0 exactly, whatever its norms are, unless the baseline looks beyond the group.
    """
    if not BASELINES[name].zero_on_equal:
        return torch.ones(rewards.shape[0], dtype=torch.bool, device=rewards.device)
    return mixed_groups(rewards)


def mixed_groups(rewards: Tensor) -> Tensor:
    """Which groups have unequal rewards: [Q, G] -> bool [Q]."""
    return rewards.amax(-1) != rewards.amin(-1)


def sanitize_norms(norms_sq: Tensor) -> tuple[Tensor, int]:
    """Replace every w that is not a finite number >= 0: (w [Q, G] fp64, how many were replaced).

    The stand-in is the median of the group's other w, of the batch's where the group has none, 1 where the batch has
    none either. A caller that sees more than a few should stop: an infinite norm is a broken gradient. Through the
    median a stand-in knows of the w of the sample whose baseline it enters; that bias lasts as long as the fault does.

    Example: [[1, 3, nan, 2]] -> ([[1, 3, 2, 2]], 1)
    """
    norms_sq = norms_sq.to(torch.float64)
    bad = ~norms_sq.isfinite() | (norms_sq < 0)
    count = int(bad.sum())
    if not count:
        return norms_sq, 0
    known = norms_sq.masked_fill(bad, float("nan"))
    batch = known.flatten().nanquantile(0.5).nan_to_num(nan=1.0)
    group = known.nanquantile(0.5, dim=-1, keepdim=True)  # [Q, 1], the median of those that are left
    stand_in = torch.where(group.isnan(), batch, group)
    return torch.where(bad, stand_in, norms_sq), count


def variance_ratio_vs_rloo(rewards: Tensor, norms_sq: Tensor, baseline: Tensor) -> float:
    """sum (r - b)^2 w / sum (r - b_rloo)^2 w over the batch, all [Q, G]: below 1, the baseline beats rloo's.

    An estimate of E||A s||^2 against rloo's: the second moment of one response's term of the gradient. It leaves out
    the squared mean ||grad J||^2 (the same for every unbiased baseline), the covariance that a shared baseline puts
    between the responses of a group (and so cannot rank baselines that differ by less), importance ratios, and any
    scale on A (grpo's std). NaN where rloo's sum is 0 (every group of equal rewards) or G = 1.
    """
    rewards, (weights, _) = rewards.to(torch.float64), sanitize_norms(norms_sq)
    if rewards.shape[1] == 1:
        return float("nan")
    reference = mean_of_others(rewards, torch.ones_like(rewards))
    ours, theirs = (((rewards - b) ** 2 * weights).sum() for b in (baseline.to(torch.float64), reference))
    return float(ours / theirs) if theirs > 0 else float("nan")
