"""Truncated importance ratios against the trainer/rollout mismatch. Pure torch.

The rollout engine and the trainer compute the same policy with different kernels, so a response was drawn from mu and
is differentiated under pi. Weighting by pi / mu undoes that in expectation; cutting the weight at a cap C bounds its
variance at the price of a small bias (truncated importance sampling, Ionides 2008):

    token level      rho_t = min(pi(o_t) / mu(o_t), C)
    sequence level   rho   = min(prod_t pi(o_t) / mu(o_t), C), the same for every token of the response

Degenerate cases:
    an empty response         no token, nothing counted; the empty product is 1
    mu(o_t) = 0, pi(o_t) > 0  the ratio is infinite: cut to C and counted (such a token cannot have been drawn)
    mu(o_t) = pi(o_t) = 0     they agree: ratio 1
    pi(o_t) = 0 < mu(o_t)     ratio 0, and so is the sequence's, whatever its other tokens
    NaN log-probs             stay NaN: a broken model is not hidden
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Level = Literal["none", "token", "sequence"]


@torch.no_grad()
def truncated_ratios(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, level: Level, cap: float
) -> tuple[Tensor, Tensor]:
    """Importance ratios of the response tokens, without gradient.

    Args:
        logprobs: [b, t] log pi under the trainer.
        rollout_logprobs: [b, t] log mu as the engine returned them.
        mask: [b, t] True on response tokens.
        level: "none" gives ones.
        cap: C >= 1.

    Returns:
        ratios [b, t] in logprobs' dtype, 0 outside the mask; and the number of response tokens whose ratio was cut.

    Example, level "token", cap 2: log pi [-1., -1.], log mu [-1., -3.] -> [1., 2.] and 1.
    """
    difference = torch.where(logprobs == rollout_logprobs, 0.0, logprobs - rollout_logprobs)
    difference = torch.where(mask, difference, 0.0)  # [b, t]
    if level == "none":
        difference = torch.zeros_like(difference)
    elif level == "sequence":
        total = difference.sum(dim=-1, keepdim=True, dtype=torch.float64)  # [b, 1]; a long sum in fp32 loses digits
        impossible = (difference == -torch.inf).any(dim=-1, keepdim=True)
        difference = total.masked_fill(impossible, -torch.inf).to(difference.dtype).expand_as(difference)
    ratios = difference.exp()
    cut = (ratios > cap) & mask
    return ratios.clamp(max=cap) * mask, cut.sum()
