"""Modules of the local layer spec (no Transformer Engine): RMSNorm and core attention over torch's own kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from oblr_megatron.model.taps import Tap


class RMSNorm(nn.RMSNorm):
    """RMSNorm that also works under sequence parallelism, which megatron-core's wrapper of torch's refuses.

    The mark `weight.sequence_parallel` is what megatron-core's gradient reduction looks for: with the sequence split,
    each tensor-parallel rank holds only its tokens' part of this weight's gradient. The q and k norms act inside
    attention, on whole sequences, and are reduced by name; they carry the mark too, as Transformer Engine's do.
    """

    tap: Tap | None = None  # where the weight's gradient goes (see taps.py); without one, to autograd

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = torch.get_default_device() if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        if self.tap is None or not self.weight.requires_grad:
            return super().forward(x)
        return _TappedRMSNorm.apply(x, self.weight, self.eps, self.tap)


class _TappedRMSNorm(torch.autograd.Function):
    """y = w * x_hat, x_hat = x / sqrt(mean x^2 + eps); the weight's gradient is handed to the tap, factor by factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, eps: float, tap: Tap) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.eps, ctx.tap = weight, eps, tap
        return functional.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        x_hat, dy_wide = x.to(wide), dy.to(wide)
        rstd = x_hat.square().mean(-1, keepdim=True).add_(ctx.eps).rsqrt_()
        x_hat = x_hat * rstd
        ctx.tap.sink.scale(ctx.weight, x_hat, dy_wide)
        scaled = dy_wide * ctx.weight
        dx = (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True)) * rstd
        return dx.to(x.dtype), None, None, None


class SdpaAttention(nn.Module):
    """Causal grouped-query attention by torch's scaled_dot_product_attention.

    Causality is all the masking right-padded rows need: padding comes after every token that counts.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,  # [t, b, heads / tp, head_dim]
        key: Tensor,  # [t, b, groups / tp, head_dim]
        value: Tensor,  # [t, b, groups / tp, head_dim]
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Returns [t, b, heads / tp * head_dim]."""
        assert attention_mask is None and attention_bias is None and packed_seq_params is None, "causal mask only"
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return context.permute(2, 0, 1, 3).flatten(2)
