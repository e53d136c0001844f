"""Operations of a layer on a CPU, where megatron-core has torch operations and fused kernels only for GPUs.

    SwiGLU         silu(gate) * up of a dense model; equal to the last bit
    apply_rotary   the rotary embedding; the sum is rounded once instead of twice

They keep fewer tensors for backward, and make fewer passes over the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu


class SwiGLU(nn.Module):
    """Stands where megatron-core puts an activation by Transformer Engine: `MLPSubmodules.activation_func`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2 f], gate then up -> [..., f]."""
        return _SwiGLU.apply(x)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save; megatron-core 0.16 asks every part of an MLP."""
        return {}


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        d_gate, d_up = dx.chunk(2, dim=-1)
        torch.mul(silu(gate), dy, out=d_up)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=d_gate)
        return dx


def apply_rotary(original: Callable[..., Tensor], x: Tensor, angles: Tensor, **options: Any) -> Tensor:
    """megatron-core's `_apply_rotary_pos_emb_bshd`: x [t, ..., head_dim], angles [t, ..., head_dim] -> like x.

    bf16 is left to the original, which is faster there; so are options that our models do not have.
    """
    usual = not options.get("rotary_interleaved") and options.get("mscale", 1.0) == 1.0
    if not usual or x.dtype not in (torch.float32, torch.float64) or angles.shape[-1] != x.shape[-1]:
        return original(x, angles, **options)
    return _Rotary.apply(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


class _Rotary(torch.autograd.Function):
    """Turns the pair (x_j, x_(j + half)) by the angle j, which stands in both halves; backward turns it back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turned(x, cosines, sines, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _turned(dy, cosines, sines, -1), None, None


def _turned(x: Tensor, cosines: Tensor, sines: Tensor, sign: int) -> Tensor:
    turned, half = x * cosines, x.shape[-1] // 2
    turned[..., :half].addcmul_(x[..., half:], sines[..., :half], value=-sign)
    turned[..., half:].addcmul_(x[..., :half], sines[..., half:], value=sign)
    return turned
