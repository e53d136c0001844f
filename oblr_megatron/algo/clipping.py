"""Clipped ratios: the weights m_t of a batch's later updates, after the policy has moved away from pi_old. Pure torch.

    r_t = pi(o_t) / pi_old(o_t)              algo.ratio "token"
    r   = (prod_t r_t)^(1/T), for every t    algo.ratio "sequence" (GSPO, arXiv 2507.18071)

pi_old is the policy before the first update on the batch. The gradient is sum_t m_t A grad log pi(o_t), with

    ppo     m_t = r_t, but 0 where min(r A, clip(r, 1 - low, 1 + high) A) has no gradient (arXiv 1707.06347):
            A > 0 and r > 1 + high;  A < 0 and r < 1 - low;  A < 0 and r > dual (dual clip, arXiv 1912.09729)
    cispo   m_t = clip(r_t, 1 - low, 1 + high), so that no token loses its gradient (arXiv 2506.13585)

Degenerate cases:
    no bound (None)        that side is not clipped
    an empty response      no tokens
    pi = pi_old = 0        ratio 1
    pi(o_t) = 0 < pi_old   ratio 0, also that of the response
    NaN log-probs          stay NaN, so that a broken model is noticed
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from oblr_megatron.algo.importance import log_ratios, of_samples

if TYPE_CHECKING:
    from oblr_megatron.config.algo import AlgoConfig


class ClippedRatios(NamedTuple):
    """Weights of the response tokens, [b, t] each; 0 or False outside the mask."""

    weights: Tensor  # m_t
    clipped: Tensor  # bool: outside [1 - low, 1 + high]; with "ppo" only on the side that A's sign selects
    beyond_dual: Tensor  # bool: A < 0 and r > dual


@torch.no_grad()
def clipped_ratios(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    algo: AlgoConfig,
    *,
    cu_seqlens: Tensor | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> ClippedRatios:
    """The weights of one microbatch, without gradient.

    Args:
        logprobs: [b, t] log pi.
        old_logprobs: [b, t] log pi_old.
        mask: [b, t] True on response tokens.
        advantages: [b, t] numbers with the sign of A.
        algo: ratio, surrogate, clip_low, clip_high and clip_dual are read.
        cu_seqlens: as in `importance.truncated_ratios`.
        reduce: as in `importance.truncated_ratios`; called only with ratio "sequence".

    Example, PPO with low = high = 0.2, A > 0: r = [1.1, 1.5] -> weights [1.1, 0], clipped [False, True]
    """
    difference = log_ratios(logprobs, old_logprobs, mask)
    if algo.ratio == "sequence":
        difference = of_samples(difference, mask, cu_seqlens, reduce, mean=True)
    ratios = difference.exp()
    low = -math.inf if algo.clip_low is None else 1 - algo.clip_low
    high = math.inf if algo.clip_high is None else 1 + algo.clip_high
    if algo.surrogate == "cispo":
        weights = ratios.clamp(low, high)
        return ClippedRatios(weights * mask, (weights != ratios) & ~ratios.isnan() & mask, torch.zeros_like(mask))
    dual = math.inf if algo.clip_dual is None else algo.clip_dual
    clipped = (((advantages > 0) & (ratios > high)) | ((advantages < 0) & (ratios < low))) & mask
    beyond = (advantages < 0) & (ratios > dual) & mask
    return ClippedRatios(ratios.masked_fill(clipped | beyond, 0.0) * mask, clipped, beyond)
