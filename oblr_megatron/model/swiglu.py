"""The gated unit of a dense model on a CPU: silu(gate) * up, which keeps its input for backward and nothing else.

megatron-core's formula in torch operations adds its offset of 0 to `up`, keeps three more tensors of that width, and
joins the two halves' gradients by a copy. On a GPU megatron-core has a fused kernel. Values and gradients are the same
to the last bit (`tests/unit/model/test_swiglu.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu


class SwiGLU(nn.Module):
    """megatron-core's place for an activation by Transformer Engine: `MLPSubmodules.activation_func`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2 f], gate then up -> [..., f]."""
        return _SwiGLU.apply(x)


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
