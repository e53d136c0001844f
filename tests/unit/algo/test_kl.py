"""The KL penalty's slopes against autograd, and their expectation against the gradients of the KL divergences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oblr_megatron.algo.kl import k3, kl_slope


@pytest.mark.parametrize("form", ["k2", "k3"])
@given(values=st.lists(st.floats(-20, 20), min_size=1, max_size=9))
def test_the_slope_is_the_penaltys_derivative(form, values):
    difference = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    penalty = k3(difference) if form == "k3" else difference.square() / 2
    (want,) = torch.autograd.grad(penalty.sum(), difference)
    slope = kl_slope(difference, form)
    torch.testing.assert_close(slope, want, rtol=1e-12, atol=1e-12)
    assert not slope.requires_grad and (penalty >= 0).all()


@pytest.mark.parametrize("form", ["k2", "k3"])
def test_small_differences_keep_their_digits(form):
    """exp(-d) - 1 without expm1 would lose all of these digits."""
    difference = torch.tensor([1e-12], dtype=torch.float64)
    assert kl_slope(difference, form).item() == pytest.approx(1e-12, rel=1e-9)
    assert k3(torch.zeros(3)).tolist() == kl_slope(torch.zeros(3), form).tolist() == [0, 0, 0]


def distributions() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of pi, its log-probs with their gradient, and those of pi_ref, over seven tokens."""
    logits, other = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return logits.requires_grad_(), logits.log_softmax(-1), other.log_softmax(-1)


@pytest.mark.parametrize("form", ["k2", "k3"])
def test_expected_gradients(form):
    """E[kappa grad log pi] is the gradient of KL(pi || pi_ref) for k2, and of KL(pi_ref || pi) for k3."""
    logits, pi, reference = distributions()
    weights = pi.exp().detach() * kl_slope(pi - reference, form)
    divergence = (pi.exp() * (pi - reference)).sum() if form == "k2" else (reference.exp() * (reference - pi)).sum()
    (got,) = torch.autograd.grad((weights * pi).sum(), logits, retain_graph=True)
    (want,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_the_mean_of_k3_is_the_divergence():
    _, pi, reference = (values.detach() for values in distributions())
    want = (pi.exp() * (pi - reference)).sum()
    torch.testing.assert_close((pi.exp() * k3(pi - reference)).sum(), want, rtol=1e-12, atol=0)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="k1"):
        kl_slope(torch.zeros(1), "k1")
