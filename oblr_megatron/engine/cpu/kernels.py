"""Faster steps of an engine on a CPU: vLLM's own kernels for norms, fewer operations for the noise of a request, and
plain products for an adapter.

vLLM builds its norm kernels for CPUs too, but its layers call them on GPUs only. Its sampler draws one number from the
generator of each request, in four operations. All draws stay the same; norms change by rounding. For LoRA vLLM copies
the adapter once for every token, because tokens may have different ones. Here all tokens have the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VECTOR = 16
"""Values that the kernel reads at once. The length of a row must be a multiple."""


def install() -> None:
    """Replace three methods of vLLM's layers in this process.

    Raises:
        RuntimeError: this vLLM has other kernels.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    missing = [name for name in ("rms_norm", "fused_add_rms_norm", "fused_gumbel_argmax") if not hasattr(_ops(), name)]
    if missing or not hasattr(TopKTopPSampler, "forward_cpu") or not hasattr(PunicaWrapperCPU, "add_lora_linear"):
        raise RuntimeError(f"this vLLM has other CPU kernels: {', '.join(missing) or 'another sampler or adapter'}")
    if "forward_cpu" not in vars(RMSNorm):  # or `extras.exact_sums` has replaced it, which comes first
        RMSNorm.forward_cpu = rms_norm  # type: ignore[method-assign]
    TopKTopPSampler.forward_cpu = sample  # type: ignore[method-assign, assignment]
    PunicaWrapperCPU.add_lora_linear = add_adapter  # type: ignore[method-assign, assignment]


def rms_norm(norm: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """`RMSNorm.forward_cpu`: x [..., h] -> [..., h]; with a residual also x + residual. May write to both."""
    weight, eps = norm.weight.data, norm.variance_epsilon
    whole = norm.has_weight and norm.variance_size_override is None and len(weight) % VECTOR == 0
    if not whole or {x.dtype, weight.dtype} != {torch.float32}:  # the kernel rounds bf16 once, other code twice
        return norm.forward_native(x, residual)
    if residual is None:
        x = x.contiguous()
        out = torch.empty_like(x)
        _ops().rms_norm(out, x, weight, eps)
        return out
    _ops().fused_add_rms_norm(x, residual, weight, eps)
    return x, residual


def sample(
    sampler: Any, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`TopKTopPSampler.forward_cpu`: logits [B, V] at the temperature -> tokens [B] and log-probs [B, V].

    Args:
        sampler: vLLM's own.
        logits: may be written to.
        generators: of the requests, by row; rows of one request share one and draw in the order of the dictionary.
        k, p: [B] each, or None.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    if sampler.logprobs_mode != "processed_logprobs" or sampler.use_fp64_gumbel:
        return sampler.forward_native(logits, generators, k, p)
    logits = apply_top_k_top_p(logits, k, p)
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    seeds = torch.randint(0, 2**31, (len(logits),))
    rows = seeds.split(1)
    for row, generator in generators.items():
        rows[row].random_(0, 2**31, generator=generator)
    return _ops().fused_gumbel_argmax(logits.to(torch.float32), seeds), logprobs


def add_adapter(
    wrapper: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: tuple[Tensor, ...],
    lora_b_stacked: tuple[Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: object,
) -> None:
    """`PunicaWrapperCPU.add_lora_linear` for one slot: y += scale B (A x), for each matrix of a fused layer.

    Args:
        wrapper: vLLM's own; it knows whether the batch has an adapter. All of its tokens have it, or none.
        y: the layer's output [..., out], written to.
        x: its input [..., in].
        lora_a_stacked: A of each matrix [1, 1, rank, in].
        lora_b_stacked: B of each matrix [1, 1, out of the matrix, rank].
        scale: 1.0, because it is in B.
        output_slices: out of each matrix.
    """
    if wrapper.no_lora:
        return
    x, parts = x.flatten(0, -2), y.view(-1, y.shape[-1]).split(output_slices, dim=1)
    for part, a, b in zip(parts, lora_a_stacked, lora_b_stacked, strict=True):
        part.addmm_(x @ a[0, 0].t(), b[0, 0].t(), alpha=scale)


def _ops() -> Any:
    return torch.ops._C
