"""A token-wise penalty on the divergence from a reference model, estimated from the sampled tokens.

    d_t = log pi(o_t | q, o_<t) - log pi_ref(o_t | q, o_<t),   loss += beta / divisor * sum_i sum_t k(d_t)

    k2    k = d^2 / 2             kappa = d              its expected gradient is that of KL(pi || pi_ref)
    k3    k = exp(-d) - 1 + d     kappa = 1 - exp(-d)    that of KL(pi_ref || pi), bounded where pi_ref is small

GRPO uses k3 (arXiv 2402.03300, eq. 4). The names are from Schulman (joschu.net/blog/kl-approx.html): E[k3] equals
KL(pi || pi_ref), and k3 >= 0. kappa = dk/dd multiplies grad log pi(o_t). Both distributions are taken at the rollout's
temperature. As in GRPO, the effect of a token on the divergence of later tokens is ignored.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KLForm = Literal["k2", "k3"]


def k3(difference: Tensor) -> Tensor:
    """k3 of each token in nats, with the shape of `difference`: the divergence that is logged."""
    return (-difference).expm1() + difference


def kl_slope(difference: Tensor, form: KLForm) -> Tensor:
    """kappa = dk/dd of each token, detached: it weights grad log pi and is not differentiated."""
    match form:
        case "k2":
            return difference.detach()
        case "k3":
            return -(-difference.detach()).expm1()
    raise ValueError(f"kl_loss {form!r} is none of k2, k3")
