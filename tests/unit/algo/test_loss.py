"""The loss and its coefficients against written-out formulas. Not covered: log-probs from a model, sharded or not."""

from __future__ import annotations

import pytest
import torch

from oblr_megatron.algo.loss import policy_gradient_loss, sample_coefficients

ADVANTAGES = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, -1.0], dtype=torch.float64)
LENGTHS = torch.tensor([1, 2, 3, 4, 0, 5])


@pytest.mark.parametrize(
    ("aggregation", "divisors"),
    [("constant", [6] * 6), ("token_mean", [16] * 6), ("sample_mean", [6, 12, 18, 24, 6, 30])],
)
def test_coefficients(aggregation, divisors):
    """As a divisor an empty response counts as one token: 1 + 2 + 3 + 4 + 1 + 5 = 16."""
    got = sample_coefficients(ADVANTAGES, LENGTHS, 3, 2, aggregation)
    torch.testing.assert_close(got, ADVANTAGES / torch.tensor(divisors), rtol=1e-15, atol=0)


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="median"):
        sample_coefficients(ADVANTAGES, LENGTHS, 3, 2, "median")


@pytest.mark.parametrize("aggregation", ["constant", "sample_mean"])
def test_a_part_of_the_step_has_the_coefficients_of_the_whole(aggregation):
    """Prompts that are finished first are used first (rollout.overlap)."""
    whole = sample_coefficients(ADVANTAGES, LENGTHS, 3, 2, aggregation)
    part = sample_coefficients(ADVANTAGES[:4], LENGTHS[:4], 3, 2, aggregation)
    assert part.tolist() == whole[:4].tolist()


def test_every_sample_has_a_length():
    with pytest.raises(AssertionError, match="one length for each sample"):
        sample_coefficients(ADVANTAGES[:4], LENGTHS, 3, 2)


def test_the_token_scale_divides_the_constant_aggregation_alone():
    for aggregation, factor in (("constant", 20.0), ("token_mean", 1.0), ("sample_mean", 1.0)):
        plain = sample_coefficients(ADVANTAGES, LENGTHS, 3, 2, aggregation)
        scaled = sample_coefficients(ADVANTAGES, LENGTHS, 3, 2, aggregation, 20.0)
        torch.testing.assert_close(scaled * factor, plain, rtol=1e-15, atol=0)


def loss_inputs():
    random = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(3, 4, generator=random, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    coefficients = torch.tensor([0.5, -2.0, 7.0], dtype=torch.float64)
    return logprobs.requires_grad_(), mask, coefficients, 1 + torch.rand(3, 4, generator=random, dtype=torch.float64)


def test_the_gradient_is_minus_coefficient_times_ratio_at_response_tokens():
    logprobs, mask, coefficients, ratios = loss_inputs()
    loss = policy_gradient_loss(logprobs, mask, coefficients, ratios)
    want = sum(-coefficients[i] * ratios[i, t] * logprobs[i, t] for i in range(3) for t in range(4) if bool(mask[i, t]))
    torch.testing.assert_close(loss, want, rtol=1e-14, atol=0)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -coefficients[:, None] * ratios * mask, rtol=1e-15, atol=0)


def test_ratios_are_not_differentiated():
    logprobs, mask, coefficients, _ = loss_inputs()
    old = logprobs.detach() - 0.3
    policy_gradient_loss(logprobs, mask, coefficients, (logprobs - old).exp()).backward()
    want = -coefficients[:, None] * torch.tensor(0.3, dtype=torch.float64).exp() * mask
    torch.testing.assert_close(logprobs.grad, want, rtol=1e-14, atol=0)


def test_values_outside_the_mask_are_ignored_even_nan():
    logprobs, mask, coefficients, ratios = loss_inputs()
    clean = policy_gradient_loss(logprobs, mask, coefficients, ratios)
    dirty = logprobs.detach().masked_fill(~mask, float("nan")).requires_grad_()
    loss = policy_gradient_loss(dirty, mask, coefficients, ratios.masked_fill(~mask, float("inf")))
    loss.backward()
    assert loss == clean and dirty.grad.isfinite().all()


def test_the_loss_keeps_the_dtype_of_the_log_probs():
    logprobs, mask, coefficients, ratios = loss_inputs()
    assert policy_gradient_loss(logprobs.float(), mask, coefficients, ratios.float()).dtype == torch.float32
