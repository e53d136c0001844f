"""The policy's weights as a stream of whole Hugging Face tensors, gathered one parameter at a time.

    weights = MegatronWeights(policy, dtype=torch.bfloat16)
    for name, tensor in weights:            # collective: on every rank, in the same order
        ...
    for name, view in weights.views():      # the same without copies; a view is valid until the next one
        ...

Every rank receives every tensor. In addition to its own shards it holds at most one parameter at a time. (q, k, v are
one parameter; so is one layer of one expert.) The order is: embedding, layers, final norm, output layer (none if tied).
The tensors of a parameter are neighbours (q, k, v; gate, up), and so are the experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.weights.names import (
    EMBEDDING,
    OUTPUT,
    Entry,
    ModelShape,
    entry,
    layer_of,
    shard_shape,
    table,
    views,
)

if TYPE_CHECKING:
    from torch import nn
    from vllm.distributed.weight_transfer.base import WeightSource

    from oblr_megatron.model.qwen3 import Policy

Room = Callable[[tuple[int, ...]], Tensor]
"""Allocates memory of a shape, in the dtype that is sent."""


class TensorMeta(NamedTuple):
    """Describes one tensor of the iteration. Example: TensorMeta("model.norm.weight", torch.bfloat16, (1024,))"""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def metadata_of(shape: ModelShape, dtype: torch.dtype) -> list[TensorMeta]:
    """Names and shapes of a whole model in export order, from its sizes alone."""
    return [
        TensorMeta(name, dtype, size) for item in table(shape) for name, size in zip(item.hf, item.shapes, strict=True)
    ]


class MegatronWeights:
    """The current weights of a policy; every `iter()` is a new pass over their values at that time.

    Without tensor parallelism a tensor may share memory with the weights: use it before the next optimizer step, and do
    not write to it.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype | None = None) -> None:
        """Args:
        policy: the model.
        dtype: tensors are cast to it before they are sent; by default the weights' own.
        """
        self._policy = policy
        self._shape = ModelShape.of(policy.hf_config)
        self._dtype = dtype or policy.transformer_config.params_dtype

    def metadata(self) -> list[TensorMeta]:
        """The tensors that iteration yields, in its order; no communication."""
        return metadata_of(self._shape, self._dtype)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        def fresh(size: tuple[int, ...]) -> Tensor:
            return torch.empty(size, dtype=self._dtype, device=self._policy.parallel.device)

        for item, found in self._stream(fresh):
            for (name, view), size in zip(found, item.shapes, strict=True):
                yield name, view.to(self._dtype).reshape(size)

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """The same tensors without copies, for a caller that copies each one before it takes the next.

        A view has the tensor's elements in row-major order. It may have more dimensions, be strided, and have the
        weights' own dtype instead of the declared one. Its memory is reused for the next view.
        """
        scratch = torch.empty(self._largest(), dtype=self._dtype, device=self._policy.parallel.device)
        for _, found in self._stream(lambda size: scratch[: prod(size)].view(size)):
            yield from found

    def _stream(self, room: Room) -> Iterator[tuple[Entry, list[tuple[str, Tensor]]]]:
        items = table(self._shape)
        names = {item.megatron: item.hf for item in items}  # the usual names; `entry` also knows those of fused norms
        own = {
            names[name] if name in names else entry(name, self._shape).hf: parameter
            for name, parameter in self._policy.named_parameters()
            if not (self._shape.tied and name == OUTPUT)  # the last stage's copy of the embedding
        }
        for item in items:
            yield item, views(item, self._stacked(item, own.get(item.hf), room), self._shape)

    @torch.no_grad()
    def _stacked(self, item: Entry, parameter: nn.Parameter | None, room: Room) -> Tensor:
        """All shards of a parameter, [ranks, *shard]: gathered by their owners, then sent to the other ranks."""
        parallel = self._policy.parallel
        stage, owner = self._stage_of(item), self._expert_rank_of(item)
        assert (parameter is not None) == (stage == parallel.pp_rank and owner in (None, parallel.ep_rank)), (
            f"{item.megatron} belongs to pipeline stage {stage}, expert-parallel rank {owner}"
        )
        size = self._stacked_shape(item)
        if parameter is None:
            stacked = room(size)
        elif size[0] == 1 and (not self._travels(item) or parameter.dtype == self._dtype):
            stacked = parameter.detach()[None]
        else:
            stacked = self._gathered(item, parameter, room(size))
        if owner is not None and parallel.ep_size > 1 and stage == parallel.pp_rank:
            dist.broadcast(stacked, group_src=owner, group=parallel.ep_group)
        if parallel.pp_size > 1:
            dist.broadcast(stacked, src=parallel.stage_rank(stage), group=parallel.pp_group)
        return stacked

    def _gathered(self, item: Entry, parameter: nn.Parameter, stacked: Tensor) -> Tensor:
        """Cast this rank's shard into its place, and receive the other shards.

        Broadcasts from each rank move as many bytes as an all-gather, but gloo's all-gather (and NCCL's of a list)
        needs a second copy of the whole tensor.
        """
        parallel = self._policy.parallel
        group = parallel.tp_group if item.expert is None else parallel.etp_group
        stacked[group.rank() if len(stacked) > 1 else 0].copy_(parameter.detach())
        if len(stacked) > 1:
            for rank, shard in enumerate(stacked):
                dist.broadcast(shard, group_src=rank, group=group)
        return stacked

    def _travels(self, item: Entry) -> bool:
        """Whether the parameter must be sent to ranks that hold no part of it."""
        parallel = self._policy.parallel
        return parallel.pp_size > 1 or (item.expert is not None and parallel.ep_size > 1)

    def _stacked_shape(self, item: Entry) -> tuple[int, ...]:
        parallel, padded = self._policy.parallel, self._policy.padded_vocab_size
        ranks = parallel.tp_size if item.expert is None else parallel.etp_size
        shard = shard_shape(item, self._shape, tp_size=ranks, padded_vocab=padded)
        return (1 if item.cut == "replicated" else ranks, *shard)

    def _largest(self) -> int:
        """Elements of the largest parameter that is gathered or sent; 0 if all are used in place."""
        sizes = [(self._stacked_shape(item), self._travels(item)) for item in table(self._shape)]
        return max((prod(size) for size, travels in sizes if travels or size[0] > 1), default=0)

    def _expert_rank_of(self, item: Entry) -> int | None:
        """The expert-parallel rank that holds an expert's parameter; None for other parameters."""
        if item.expert is None:
            return None
        return item.expert // (self._shape.experts // self._policy.parallel.ep_size)

    def _stage_of(self, item: Entry) -> int:
        """The pipeline stage that holds the parameter; chunks of layers are assigned to the stages in turn."""
        parallel = self._policy.parallel
        layer = layer_of(item)
        if layer is not None:
            chunk = layer // (self._shape.layers // (parallel.pp_size * parallel.vp_size))
            return chunk % parallel.pp_size
        return 0 if item.megatron == EMBEDDING else parallel.pp_size - 1


def vllm_source(policy: Policy, dtype: torch.dtype | None = None) -> WeightSource:
    """The same stream as vLLM's own `WeightSource`, for its built-in transfer engines.

    vLLM is imported only here: the import takes seconds, and neither an export nor a push to another process needs it.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class VllmWeights(MegatronWeights, WeightSource):
        def metadata(self) -> list[ParamMeta]:  # type: ignore[override]
            return [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in super().metadata()]

    return VllmWeights(policy, dtype)
