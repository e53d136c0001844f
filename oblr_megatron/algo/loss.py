"""The policy-gradient loss. Its gradient is -g, with the estimator g = sum_i c_i sum_t rho_t grad log pi(o_t).

Samples with c_i = 0 may be left out of the pass. The divisors below still count them.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Aggregation = Literal["constant", "token_mean", "sample_mean"]


def sample_coefficients(
    advantages: Tensor,
    lengths: Tensor,
    num_prompts: int,
    group_size: int,
    aggregation: Aggregation = "constant",
    token_scale: float = 1.0,
) -> Tensor:
    """The coefficients c_i [N] of sum_t rho_t log pi(o_t) for N samples of a step of Q * G.

        constant     A_i / (Q G L)         unbiased: L = token_scale is a constant (Dr. GRPO, arXiv 2503.20783)
        token_mean   A_i / sum_j L_j       biased: the divisor depends on o_i's own length (DAPO, arXiv 2503.14476)
        sample_mean  A_i / (Q G L_i)       more biased: E[s_i / L_i] is not 0, so that even a constant reward has a
                                           gradient; long wrong answers are penalised less (GRPO; see arXiv 2503.20783)

    Args:
        advantages: [N] of the samples. "token_mean" needs all samples of the step.
        lengths: [N] response tokens; as a divisor an empty response counts as one token.
        num_prompts: Q, prompts of the step, skipped groups included.
        group_size: G.
        token_scale: L of "constant", so that the gradient's unit is that of a mean over tokens.
    """
    num_samples = num_prompts * group_size
    assert advantages.shape == lengths.shape, (
        f"one length for each sample expected: advantages {tuple(advantages.shape)}, lengths {tuple(lengths.shape)}"
    )
    lengths = lengths.to(advantages.dtype).clamp(min=1)
    match aggregation:
        case "constant":
            return advantages / (num_samples * token_scale)
        case "token_mean":
            return advantages / lengths.sum()
        case "sample_mean":
            return advantages / (num_samples * lengths)
    raise ValueError(f"aggregation {aggregation!r} is none of constant, token_mean, sample_mean")


def policy_gradient_loss(logprobs: Tensor, mask: Tensor, coefficients: Tensor, ratios: Tensor) -> Tensor:
    """-sum_i c_i sum_t rho_t log pi(o_t), a scalar without any further divisor.

    Args:
        logprobs: [b, t] with gradient; values outside the mask are ignored, even NaN.
        mask: [b, t] bool, True at response tokens.
        coefficients: [b] from `sample_coefficients`, or [b, t] for each token.
        ratios: [b, t] importance ratios rho; detached here, so that they weight the score.
    """
    logprobs, ratios = logprobs.masked_fill(~mask, 0.0), ratios.detach().masked_fill(~mask, 0.0)
    if coefficients.dim() == 1:
        coefficients = coefficients[:, None]
    return -(coefficients.to(logprobs.dtype) * ratios * logprobs).sum()
