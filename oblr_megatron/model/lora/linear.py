"""A linear layer without bias that every tensor-parallel rank holds whole, or every rank with the expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class ReplicatedLinear(nn.Module):
    """x [..., in] -> x W^T [..., out] with W [out, in], called as megatron-core's linear layers are.

    Without sequence parallelism all ranks have the same tokens and the same gradient. With it each has its part of the
    tokens and a partial gradient, which megatron-core sums because of the mark `sequence_parallel`. An expert has all
    tokens that were sent to it.
    """

    def __init__(
        self, inputs: int, outputs: int, config: TransformerConfig, device: torch.device, *, expert: bool = False
    ) -> None:
        super().__init__()
        weight: Any = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        if expert:  # megatron-core's marks
            weight.allreduce = False
        else:
            weight.sequence_parallel = config.sequence_parallel
        self.weight = weight

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """The product, and no bias."""
        options: dict[str, Any] = {"allreduce_dgrad": False, "sequence_parallel": False, "tp_group": None}
        return self._forward_impl(input=x, weight=self.weight, bias=None, **options), None

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: None, **_options: Any) -> Tensor:
        return nn.functional.linear(input, weight)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weight for megatron-core's distributed checkpoints."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)
        return sharded
