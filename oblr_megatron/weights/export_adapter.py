"""The adapters of a policy as a stream of whole tensors under PEFT's names, gathered a layer at a time.

A layer takes one message for its adapters outside experts and one for those of its experts.

for name, tensor in MegatronAdapter(policy, adapter, torch.bfloat16):     # collective: on every rank, in one order
    ...
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from oblr_megatron.model.lora.adapters import is_adapter
from oblr_megatron.weights.adapter import PREFIX, AdapterShape, AdapterTensor, adapter_table
from oblr_megatron.weights.export import TensorMeta, share_rows, stage_of
from oblr_megatron.weights.names import ModelShape, layer_of

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.model.policy import Policy


class MegatronAdapter:
    """The current A and B of a policy; every `iter()` is a new pass over their values at that time."""

    def __init__(self, policy: Policy, adapter: AdapterShape, dtype: torch.dtype | None = None) -> None:
        """Args:
        policy: a model with adapters.
        adapter: their rank and targets.
        dtype: tensors are cast to it before they are sent; by default the weights' own.
        """
        self._policy, self._dtype = policy, dtype or policy.transformer_config.params_dtype
        self._tensors = list(adapter_table(ModelShape.of(policy.hf_config), adapter))

    def metadata(self) -> list[TensorMeta]:
        """The tensors that iteration yields, in its order; no communication."""
        return [TensorMeta(tensor.name, self._dtype, tensor.shape) for tensor in self._tensors]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        parallel, policy = self._policy.parallel, self._policy
        own = {name: parameter for name, parameter in policy.named_parameters() if is_adapter(name)}
        for (_, experts), items in groupby(self._tensors, key=_message):
            tensors = list(items)
            group, stage = parallel.expert_group if experts else parallel.tp_group, stage_of(policy, tensors[0].item)
            held = len(tensors) // group.size() if experts else len(tensors)  # by a rank: its experts', or its parts
            shapes = [_part(tensor, group.size()) for tensor in tensors[:held]]
            sizes = [prod(shape) for shape in shapes]
            rows = torch.empty(group.size(), sum(sizes), dtype=self._dtype, device=parallel.device)
            row = rows[group.rank()]
            if stage == parallel.pp_rank:
                first = group.rank() * held if experts else 0
                for tensor, part in zip(tensors[first : first + held], row.split(sizes), strict=True):
                    part.copy_(own[megatron_name(tensor.name)].flatten())
            if parallel.pp_size > 1:
                dist.broadcast(row, group_src=stage, group=parallel.pp_group)
            share_rows(rows, group, dist.get_backend(group))
            for owner in range(len(tensors) // held):
                owned = tensors[owner * held : (owner + 1) * held]
                received = rows[owner : owner + 1] if experts else rows
                for tensor, shape, parts in zip(owned, shapes, received.split(sizes, dim=1), strict=True):
                    shards = parts.unflatten(1, shape)
                    yield tensor.name, shards[0] if shape == tensor.shape else torch.cat(list(shards), dim=_cut(tensor))


def megatron_name(name: str) -> str:
    """The parameter of a tensor.

    >>> megatron_name("base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight")
    'decoder.layers.3.self_attention.lora.q_proj.A.weight'
    """
    inside = name.removeprefix(f"{PREFIX}model.").replace("self_attn.", "self_attention.lora.")
    return f"decoder.{inside.replace('mlp.', 'mlp.lora.').replace('.lora_', '.')}"


def _message(tensor: AdapterTensor) -> tuple[int | None, bool]:
    """The layer, and whether the tensor is an expert's: those that travel together."""
    return layer_of(tensor.item), tensor.item.expert is not None


def _cut(tensor: AdapterTensor) -> int:
    """The dimension along which tensor-parallel ranks share it, if they do."""
    return int(tensor.item.cut == "columns")


def _part(tensor: AdapterTensor, ranks: int) -> tuple[int, int]:
    """Shape of one rank's part."""
    rows, columns = tensor.shape
    if tensor.item.cut == "replicated":
        return rows, columns
    return (rows, columns // ranks) if _cut(tensor) else (rows // ranks, columns)
