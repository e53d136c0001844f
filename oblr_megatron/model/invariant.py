"""The trainer's layers on a CPU under model.batch_invariant: values of `oblr_megatron.invariant`, usual gradients.

Backward passes differentiate the plain formulas at the same inputs. Taps receive the usual inputs and output gradients
of linear layers and norms. Per-sample norms therefore stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn import functional

from oblr_megatron import invariant
from oblr_megatron.model.cpu.attention import SdpaAttention
from oblr_megatron.model.megatron_versions import flash_attention_3

if TYPE_CHECKING:
    from oblr_megatron.config import ModelConfig


def mode_of(config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """The fields of TransformerConfig for model.batch_invariant; empty without it.

    On a GPU it also turns on megatron-core's own kernels in this process (not yet run on a GPU).
    """
    if not config.batch_invariant:
        return {}
    if device.type == "cpu":
        return {"activation_func": silu}
    from megatron.core.transformer.custom_layers.batch_invariant_kernels import enable_batch_invariant_mode

    enable_batch_invariant_mode()
    return {"batch_invariant_mode": True, "attention_backend": AttnBackend.flash, **flash_attention_3()}


class InvariantAttention(SdpaAttention):
    """Rotary embedding and attention; megatron-core's own rotary embedding is off (`position_embedding_type` "none").

    Args:
        rope_parameters: of the model's configuration.
        args, options: of `SdpaAttention`.
    """

    def __init__(self, *args: Any, rope_parameters: Mapping[str, Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self._rope_parameters = rope_parameters
        self._table = torch.zeros(0, 0), torch.zeros(0, 0)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention aligned to the end, of unrotated queries [n, t, heads, head_dim] and keys [n, s, ...]."""
        places = key.shape[1]
        if len(self._table[0]) < places:
            self._table = invariant.rotary_table(2 * places, key.shape[-1], self._rope_parameters)
        cosines, sines = (table[:places] for table in self._table)

        def attended(by: Callable[[Tensor, Tensor, Tensor], Tensor], *inputs: Tensor) -> Tensor:
            q, k, v = inputs
            t = q.shape[1]
            return by(invariant.rotate(q, cosines[-t:], sines[-t:]), invariant.rotate(k, cosines, sines), v)

        exact = partial(invariant.attention, scale=self.scale)
        return _Valued.apply(partial(attended, exact), partial(attended, super()._causal), query, key, value)


def silu(x: Tensor) -> Tensor:
    """`torch.nn.functional.silu` with the values of `invariant.silu`."""
    return _Valued.apply(invariant.silu, functional.silu, x)


class _Valued(torch.autograd.Function):
    """The value of one function, and the gradient of a second one that equals it but for rounding."""

    @staticmethod
    def forward(ctx: Any, value_of: Callable[..., Tensor], smooth: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.smooth = smooth
        return value_of(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.smooth(*inputs)
        return (None, None, *torch.autograd.grad(output, inputs, gradient))
