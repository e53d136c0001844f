"""Baselines b_i and advantages A_i = r_i - b_i, fp64, one function each.

    g = 1/(Q G) sum_q sum_i A_i s_i,    s_i = grad_theta log pi(o_i),    w_i = ||s_i||^2

E[s_i] = 0, so g stays unbiased for every b_i that does not look at o_i itself: the leave-one-out ones here. OBLR-PO
(arXiv 2511.23310, Theorem 7) gives the b that minimises the variance, E[w r] / E[w]; `optimal` estimates it from the
other responses of the group.

Shapes: rewards, norms_sq, lengths and every result are [Q, G]: Q prompts, G responses each. To remove a baseline,
delete its function, its line in BASELINES and its name in `config.BaselineName`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from oblr_megatron.config_algo import AlgoConfig
from oblr_megatron.config_checks import LEAVE_ONE_OUT
from oblr_megatron.errors import UserError

BaselineFn = Callable[[Tensor, Tensor, Tensor, AlgoConfig], Tensor]

TINY_WEIGHT = 1e-6  # weights that sum to less than this share of the mean weight carry no information
STD_EPS = 1e-6  # of grpo


@dataclass(frozen=True, slots=True)
class Baseline:
    """One registry line."""

    function: BaselineFn  # (rewards, norms_sq, lengths, options) -> b, all [Q, G] fp64
    needs_norms: bool = False  # reads norms_sq
    zero_on_equal: bool = True  # A is exactly 0 in a group of equal rewards: its passes may be skipped
    divide_by_std: bool = False  # A = (r - b) / (std of the group + STD_EPS)


def none(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b_i = 0: plain REINFORCE (Williams 1992). Unbiased, and the variance the others are there to remove."""
    return torch.zeros_like(rewards)


def group_mean(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b_i = mean_j r_j, o_i included: GRPO without its std, as in Dr. GRPO (arXiv 2503.20783).

    o_i's own share makes E[g] = (1 - 1/G) grad J: a scale, not a direction. G = 1: A = 0 always. `grpo` (DeepSeekMath,
    arXiv 2402.03300) has the same b and divides A by the group's standard deviation (G - 1 in its denominator), which
    depends on o_i and so changes the direction too.
    """
    return _weighted_mean(rewards, torch.ones_like(rewards))


def rloo(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b_i = mean_{j != i} r_j (arXiv 2402.14740): `optimal` with all norms equal. G = 2: the other's reward."""
    return _mean_of_others(rewards, torch.ones_like(rewards))


def opo(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b_i = sum_j L_j r_j / sum_j L_j, o_i included, as published (arXiv 2505.23585): length stands in for w.

    Biased in direction, since o_i's share of b_i varies with its length. All lengths zero: the group's mean.
    """
    return _weighted_mean(rewards, lengths)


def length_loo(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b_i = sum_{j != i} L_j^p r_j / sum_{j != i} L_j^p, p = options.length_exponent: OPO made unbiased.

    p = 0 is rloo. The others all of length zero: their mean.
    """
    return _mean_of_others(rewards, lengths**options.length_exponent)


def optimal(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b_i = sum_{j != i} w_j r_j / sum_{j != i} w_j: OBLR-PO's Theorem 7 (arXiv 2511.23310), estimated leave-one-out.

    Degenerate cases: the others' w all zero (relative to the batch): their plain mean. Equal rewards: A = 0 exactly.
    G = 2: the other's reward, whatever w is.
    """
    return _mean_of_others(rewards, norms_sq)


def optimal_prior(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """`optimal` with one more pseudo-response: b_i = (sum w_j r_j + lam wbar p) / (sum w_j + lam wbar), j != i.

    wbar = mean_{j != i} w_j, p = mean reward of the other prompts, lam = options.prior_strength. Dividing by wbar:
    b_i = ((G - 1) b_i^optimal + lam p) / (G - 1 + lam), the group's own estimate, noisy at small G, pulled towards p.
    Unbiased, because neither part looks at o_i. lam = 0 is `optimal`. In a group of equal rewards A is not 0.

    Raises:
        UserError: Q = 1, where there is no other prompt.
    """
    num_prompts, group_size = rewards.shape
    if num_prompts == 1:
        raise UserError(
            "optimal_prior takes its prior from the other prompts, and the batch has one prompt",
            where="algo.baseline",
            mend='set num_prompts to 2 or more, or algo.baseline to "optimal"',
        )
    prior = _sum_of_others(rewards.mean(-1))[:, None] / (num_prompts - 1)  # [Q, 1]
    own, strength = optimal(rewards, norms_sq, lengths, options), options.prior_strength
    return own + (strength / (group_size - 1 + strength)) * (prior - own)


BASELINES: dict[str, Baseline] = {
    "none": Baseline(none, zero_on_equal=False),
    "group_mean": Baseline(group_mean),
    "grpo": Baseline(group_mean, divide_by_std=True),
    "rloo": Baseline(rloo),
    "opo": Baseline(opo),
    "length_loo": Baseline(length_loo),
    "optimal": Baseline(optimal, needs_norms=True),
    "optimal_prior": Baseline(optimal_prior, needs_norms=True, zero_on_equal=False),
}


def baseline_values(name: str, rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """b [Q, G] fp64 of the named baseline, the inputs checked and norms that are no numbers replaced.

    Args:
        name: key of BASELINES.
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
        raise UserError("a reward is not a finite number", where="reward", mend="return finite rewards")
    if name in LEAVE_ONE_OUT and rewards.shape[1] == 1:
        raise UserError(
            f"baseline {name!r} needs the other responses of the group, and group_size is 1",
            where="group_size",
            mend='set group_size to 2 or more, or algo.baseline to "none"',
        )
    weights, _ = sanitize_norms(norms_sq)
    return BASELINES[name].function(rewards, weights, lengths, options)


def advantages(name: str, rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> Tensor:
    """A = r - b [Q, G] fp64; `grpo` divides it by the group's std. Arguments and errors as in `baseline_values`."""
    rewards = rewards.to(torch.float64)
    centred = rewards - baseline_values(name, rewards, norms_sq, lengths, options)
    if not BASELINES[name].divide_by_std or rewards.shape[1] == 1:  # a single response has no std, and A = 0
        return centred
    return centred / (rewards.std(dim=-1, keepdim=True) + STD_EPS)


def active_groups(name: str, rewards: Tensor) -> Tensor:
    """Which groups need their forward and backward passes: rewards [Q, G] -> bool [Q].

    A group of equal rewards has A = 0 exactly, whatever its norms are, unless the baseline looks beyond the group.
    """
    if not BASELINES[name].zero_on_equal:
        return torch.ones(rewards.shape[0], dtype=torch.bool, device=rewards.device)
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
    reference = _mean_of_others(rewards, torch.ones_like(rewards))
    ours, theirs = (((rewards - b) ** 2 * weights).sum() for b in (baseline.to(torch.float64), reference))
    return float(ours / theirs) if theirs > 0 else float("nan")


def _weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """The group's mean, own entry included: [Q, G] -> [Q, G], the same along a row; plain where weights sum to 0."""
    weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, torch.ones_like(weights))
    mean = (weights * values).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    return mean.clamp(low, high).expand_as(values)  # rounding may not leave the bounds: equal values give themselves


def _mean_of_others(values: Tensor, weights: Tensor) -> Tensor:
    """m_i = sum_{j != i} w_j v_j / sum_{j != i} w_j: [Q, G] -> [Q, G], min v <= m_i <= max v over j != i.

    Sums run over the others themselves: S0 - w_i would lose every digit when w_i outweighs them. Their plain mean is
    taken where their weights sum to no more than TINY_WEIGHT of the mean weight of all samples of the batch but o_i;
    o_i is left out there too, so that nothing here depends on v_i or w_i.
    """
    rows, size = values.shape
    total = _sum_of_others(weights)
    batch = total + _sum_of_others(weights.sum(-1))[:, None]
    weighted = total > TINY_WEIGHT * batch / (rows * size - 1)
    mean = torch.where(weighted, _sum_of_others(weights * values) / total, _sum_of_others(values) / (size - 1))
    own = torch.eye(size, dtype=torch.bool, device=values.device)
    spread = values[:, None, :].expand(rows, size, size)  # row i holds v_j
    low, high = spread.masked_fill(own, torch.inf).amin(-1), spread.masked_fill(own, -torch.inf).amax(-1)
    return mean.clamp(low, high)  # as above


def _sum_of_others(values: Tensor) -> Tensor:
    """sum_{j != i} v_j along the last dimension: what stands before i plus what stands after it, without v_i."""
    before = pad(values, (1, 0))[..., :-1].cumsum(-1)
    after = pad(values.flip(-1), (1, 0))[..., :-1].cumsum(-1).flip(-1)
    return before + after
