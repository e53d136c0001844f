"""The trainer's layers on a CPU under model.batch_invariant: values of operations.py, usual gradients.

Backward passes differentiate the plain formulas at the same inputs. Taps receive the usual inputs and output gradients
of linear layers and norms. Per-sample norms therefore stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import functional

from oblr_megatron.extras.exact_sums import operations
from oblr_megatron.model.cpu.attention import SdpaAttention
from oblr_megatron.model.numerics import Numerics


def numerics_of(hf_config: Any) -> Numerics:
    """The numerics of a model: those of operations.py."""
    attention = ModuleSpec(InvariantAttention, params={"rope_parameters": hf_config.rope_parameters})
    return Numerics(operations, attention, {"activation_func": silu})


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
            self._table = operations.rotary_table(2 * places, key.shape[-1], self._rope_parameters)
        cosines, sines = (table[:places] for table in self._table)

        def attended(by: Callable[[Tensor, Tensor, Tensor], Tensor], *inputs: Tensor) -> Tensor:
            q, k, v = inputs
            t = q.shape[1]
            return by(operations.rotate(q, cosines[-t:], sines[-t:]), operations.rotate(k, cosines, sines), v)

        exact = partial(operations.attention, scale=self.scale)
        return _Valued.apply(partial(attended, exact), partial(attended, super()._causal), query, key, value)


def silu(x: Tensor) -> Tensor:
    """`torch.nn.functional.silu` with the values of `operations.silu`."""
    return _Valued.apply(operations.silu, functional.silu, x)


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
