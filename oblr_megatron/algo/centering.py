"""Score centering: the sampler's expected weighted score at every prefix is subtracted. Pure torch. arXiv 2609.20807.

A baseline is free of bias only if E_mu[rho s] = 0. A cap on ratios, rejection of tokens and rho = 1 all break this. Let
H be the recorded tokens of a prefix: the k that the sampler mu gives most probability. At each token o of a response,

    rho(v) = min(pi(v) / mu(v), C), 0 outside the band of token rejection, 0 outside H
    s_t    = rho(o) grad log pi(o) - sum_{v in H} m(v) grad log pi(v),      m(v) = mu(v) rho(v)

H, mu and pi depend on the prefix alone, so E_mu[s_t | prefix] = 0 exactly, whatever C and the band are. For that, H
must not depend on the draw: the drawn token does not join it. If H is all that could be drawn (a top-k of at most k
tokens, or a vocabulary of k), nothing is left out. Else a draw outside H loses its weight: the mean score stays 0, but
the gradient of such draws is lost.

No such sum exists for weights of whole responses: they depend on tokens after t, which no prefix determines.

Degenerate cases:
    mu(v) = 0                    m(v) = 0: the token cannot be drawn
    pi = mu, no cap is reached   sum_v m(v) grad log pi(v) = 0 over the whole vocabulary: nothing changes in expectation
    NaN log-probs                stay NaN, so that a broken model is noticed
"""

from __future__ import annotations

import torch
from torch import Tensor

from oblr_megatron.algo.importance import log_ratios


@torch.no_grad()
def expected_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    *,
    corrects: bool,
    cap: float,
    band: tuple[float, float] | None,
) -> Tensor:
    """m(v) = mu(v) rho(v) of the recorded tokens, [..., k] like both arguments, without gradient.

    Args:
        logprobs: log pi.
        sampler_logprobs: log mu; -inf where fewer than k tokens could be drawn.
        corrects: whether rho is the ratio; else 1.
        cap: C.
        band: of token rejection, both ends inside; None without.

    Example, cap 2: log pi = log [0.6, 0.4], log mu = log [0.2, 0.8] -> [0.4, 0.4]
    """
    ratios = log_ratios(logprobs, sampler_logprobs, torch.ones_like(logprobs, dtype=torch.bool)).exp()
    masses = sampler_logprobs.to(ratios.dtype).exp() * (ratios.clamp(max=cap) if corrects else 1.0)
    return masses if band is None else masses.masked_fill((ratios < band[0]) | (ratios > band[1]), 0.0)


def centred_energy(energy: Tensor, logprobs: Tensor, rho: Tensor, others: Tensor, masses: Tensor, at: Tensor) -> Tensor:
    """||d s_t / d logits||^2 of centred scores [b, t], in the unit 1 / T^2 = 1.

    With dy = c - S pi, c_v the sum of the coefficients at v and S their sum over v, it is
    sum_v c_v^2 - 2 S sum_v c_v pi(v) + S^2 sum_v pi(v)^2.

    Args:
        energy: [b, t] 1 - 2 pi(o) + sum_v pi(v)^2.
        logprobs: [b, t] log pi(o).
        rho: [b, t].
        others: [b, t, k] log pi of the recorded tokens.
        masses: [b, t, k] m.
        at: [b, t, k] whether a recorded token is o.
    """
    drawn, squares = logprobs.exp(), energy - 1 + 2 * logprobs.exp()
    left = rho - masses.sum(-1)
    own = rho.square() - 2 * rho * (masses * at).sum(-1) + masses.square().sum(-1)
    return (own - 2 * left * (rho * drawn - (masses * others.exp()).sum(-1)) + left.square() * squares).clamp(min=0)
