"""Taps of torch's LayerNorm and RMSNorm, which megatron-core's local layers use without apex.

    y = w * x_hat + b,   x_hat = (x - mean x) / sqrt(var x + eps)         RMSNorm: without b and the mean
    dw = sum of dy * x_hat,   db = sum of dy

Not tapped: subclasses with a forward of their own, Transformer Engine's norms, and apex's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from oblr_megatron.model.taps import Tap

_FORWARDS = (nn.LayerNorm.forward, nn.RMSNorm.forward)


def torch_norms(module: nn.Module, tap: Tap) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Every norm with weights inside the module, and the tapped forward for it: [..., h] -> [..., h]."""
    for child in module.modules():
        if (
            isinstance(child, (nn.LayerNorm, nn.RMSNorm))
            and type(child).forward in _FORWARDS
            and child.weight is not None
            and child.weight.dim() == 1
        ):
            yield child, partial(_forward, tap, child)


def _forward(tap: Tap, norm: Any, x: Tensor) -> Tensor:
    bias = getattr(norm, "bias", None)
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if norm.eps is None else norm.eps  # as torch
    return _TappedNorm.apply(x, norm.weight, bias, eps, isinstance(norm, nn.LayerNorm), tap)


class _TappedNorm(torch.autograd.Function):
    """torch's norm; backward passes dy * x_hat to the tap."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, eps: float, centred: bool, tap: Tap
    ) -> Tensor:
        ctx.weight, ctx.bias, ctx.eps, ctx.centred, ctx.tap = weight, bias, eps, centred, tap
        rstd = None  # [..., 1]
        if tap.operations:
            y = tap.operations.rms_norm(x, weight, eps)
        elif centred:
            y = functional.layer_norm(x, weight.shape, weight, bias, eps)
        else:  # what functional.rms_norm calls
            y, rstd = torch._fused_rms_norm(x, weight.shape, weight, eps)
            assert rstd.shape == (*x.shape[:-1], 1), f"torch's RMSNorm returns 1 / rms of shape {tuple(rstd.shape)}"
        ctx.save_for_backward(x, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x, rstd = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        x_hat, dy_wide, weight, width = x.to(wide), dy.to(wide), ctx.weight.to(wide), x.shape[-1]
        if ctx.centred:
            x_hat = x_hat - x_hat.mean(-1, keepdim=True)
        if rstd is None:
            rstd = torch.linalg.vector_norm(x_hat, dim=-1, keepdim=True).square_().div_(width).add_(ctx.eps).rsqrt_()
        x_hat = x_hat * rstd
        terms = dy_wide * x_hat
        if ctx.weight.requires_grad:
            ctx.tap.sink.scale(ctx.weight, terms)
        if ctx.bias is not None and ctx.bias.requires_grad:
            ctx.tap.sink.scale(ctx.bias, dy_wide)
        scaled = dy_wide * weight
        mean = scaled.mean(-1, keepdim=True) if ctx.centred else None
        # terms @ weight is the sum of scaled * x_hat, in one product
        dx = scaled.addcmul_(x_hat, (terms @ weight)[..., None], value=-1 / width)
        if mean is not None:
            dx -= mean
        return dx.mul_(rstd).to(x.dtype), None, None, None, None, None
