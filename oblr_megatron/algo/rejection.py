"""Rejection of tokens and responses with an importance ratio outside a band: their weight becomes 0. Pure torch.

The ratio pi / mu of trainer and rollout engine is compared with [low, high]:

    token      rho_t = pi(o_t) / mu(o_t)                   a token outside the band is left out (IcePop)
    sequence   rho   = prod_t rho_t                        a response outside the band is left out (masked TIS)
    geometric  rho   = (prod_t rho_t)^(1/T)                the same with the mean per token, for any length T

Tokens inside the band keep the weight of `algo/importance.py`. Rejection replaces E_mu[rho s] by the part of it that
lies inside the band: a bias that grows with the share of rejected tokens, for a bounded variance from both sides.

Degenerate cases:
    an empty response         kept; its ratio is 1
    mu(o_t) = 0 < pi(o_t)     the ratio is infinite: rejected
    pi(o_t) = 0 < mu(o_t)     the ratio is 0, also that of the response: rejected if low > 0
    mu(o_t) = pi(o_t) = 0     ratio 1
    NaN log-probs             kept, and the weight stays NaN, so that a broken model is noticed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from oblr_megatron.algo.importance import log_ratios, of_samples, sample_sums

RejectionLevel = Literal["none", "token", "sequence", "geometric"]


@torch.no_grad()
def kept_tokens(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: RejectionLevel,
    low: float,
    high: float,
    cu_seqlens: Tensor | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    ranks: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The response tokens that stay in the gradient.

    Args:
        logprobs: [b, t] log pi under the trainer.
        rollout_logprobs: [b, t] log mu from the engine.
        mask: [b, t] True on response tokens.
        level: the ratio that is compared with the band; "none" keeps everything.
        low: lower end of the band, itself inside.
        high: upper end of the band, itself inside.
        cu_seqlens: as in `importance.truncated_ratios`.
        reduce: as in `importance.truncated_ratios`; called on every level but "none".
        ranks: that `reduce` sums over.

    Returns:
        keep [b, t] bool, False outside the mask; the number of responses that lost a token; the number of responses
        with a token. Ranks that share samples have equal shares of both numbers.

    Example, level "token", band [0.5, 2]: log pi [-1., -1.], log mu [-1., -3.] -> [True, False], 1 and 1.
    """
    nothing = logprobs.new_zeros((), dtype=torch.float64)
    if level == "none":
        return mask, nothing, nothing
    difference = log_ratios(logprobs, rollout_logprobs, mask)
    if level != "token":
        difference = of_samples(difference, mask, cu_seqlens, reduce, mean=level == "geometric")
    ratios = difference.exp()
    rejected = ((ratios < low) | (ratios > high)) & mask
    _, (lost, tokens) = sample_sums(torch.stack([rejected, mask]), cu_seqlens, reduce)
    return mask & ~rejected, (lost > 0).sum() / ranks, (tokens > 0).sum() / ranks
