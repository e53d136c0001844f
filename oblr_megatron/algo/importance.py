"""Truncated importance ratios that correct the mismatch between trainer and rollout engine. Pure torch.

The engine and the trainer compute the same policy with different kernels: a response is drawn from mu and
differentiated under pi. Weighting by a response's pi / mu corrects this in expectation; a token's own ratio leaves the
mismatch of the other tokens, which is of first order. Truncating the weight at a cap C bounds the variance, with a bias
(truncated importance sampling, Ionides 2008):

    token level      rho_t = min(pi(o_t) / mu(o_t), C)
    sequence level   rho   = min(prod_t pi(o_t) / mu(o_t), C), the same for every token of the response

Degenerate cases:
    an empty response         no tokens; the empty product is 1
    mu(o_t) = 0, pi(o_t) > 0  the ratio is infinite: truncated to C and counted (such a token cannot have been drawn)
    mu(o_t) = pi(o_t) = 0     ratio 1
    pi(o_t) = 0 < mu(o_t)     ratio 0, also for the whole sequence
    NaN log-probs             stay NaN, so that a broken model is noticed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from oblr_megatron.runtime.device_copy import to_device

Level = Literal["none", "token", "sequence"]


@torch.no_grad()
def truncated_ratios(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Level,
    cap: float,
    cu_seqlens: Tensor | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Importance ratios of the response tokens, without gradient.

    Args:
        logprobs: [b, t] log pi under the trainer.
        rollout_logprobs: [b, t] log mu from the engine.
        mask: [b, t] True on response tokens.
        level: "none" gives ones.
        cap: C >= 1.
        cu_seqlens: [n + 1] of packed samples (b = 1), see `types.MicroBatch`; by default each row is a sample.
        reduce: sums an fp64 tensor over the ranks that each hold some tokens of every sample. Called only on level
            "sequence".

    Returns:
        ratios [b, t] in logprobs' dtype, 0 outside the mask; and the number of response tokens with a truncated ratio.

    Example, level "token", cap 2: log pi [-1., -1.], log mu [-1., -3.] -> [1., 2.] and 1.
    """
    difference = log_ratios(logprobs, rollout_logprobs, mask)
    if level == "none":
        difference = torch.zeros_like(difference)
    elif level == "sequence":
        difference = of_samples(difference, mask, cu_seqlens, reduce)
    ratios = difference.exp()
    cut = (ratios > cap) & mask
    return ratios.clamp(max=cap) * mask, cut.sum()


def log_ratios(logprobs: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """log pi - log of the other policy [b, t], 0 outside the mask and where both are -inf."""
    difference = torch.where(logprobs == other, 0.0, logprobs - other)
    return torch.where(mask, difference, 0.0)


def of_samples(
    difference: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    reduce: Callable[[Tensor], Tensor] | None,
    *,
    mean: bool = False,
) -> Tensor:
    """[b, t] log-ratios -> [b, t], the logarithm of the product of the ratios of each token's sample.

    With `mean` it is their geometric mean. Either is -inf if a token of the sample has the ratio 0.
    """
    values = torch.stack([difference, difference == -torch.inf, mask])
    sample, (totals, excluded, tokens) = sample_sums(values, cu_seqlens, reduce)
    if mean:
        totals = totals / tokens.clamp(min=1)
    return totals.masked_fill(excluded > 0, -torch.inf).to(difference.dtype)[sample]


def sample_sums(
    values: Tensor, cu_seqlens: Tensor | None, reduce: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Sums over the tokens of each sample.

    Args:
        values: [k, b, t] of tokens, 0 outside the responses.
        cu_seqlens: as in `truncated_ratios`.
        reduce: as in `truncated_ratios`.

    Returns:
        The sample of each token [b, t], and the sums [k, n] in fp64: long sums in fp32 lose digits.
    """
    rows, length = values.shape[1:]
    if cu_seqlens is None:
        sample = torch.arange(rows, device=values.device)[:, None].expand(rows, length)
        count = rows
    else:
        count = len(cu_seqlens) - 1
        numbers = torch.arange(count, device=cu_seqlens.device).repeat_interleave(cu_seqlens.diff())
        sample = to_device(numbers, values.device)[None]
    flat = values.to(torch.float64).flatten(1)
    sums = flat.new_zeros(len(flat), count).index_add(1, sample.flatten(), flat)
    return sample, sums if reduce is None else reduce(sums)
