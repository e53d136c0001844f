"""The policy's weights as a stream of whole Hugging Face tensors, gathered one parameter at a time.

    weights = MegatronWeights(policy, dtype=torch.bfloat16)
    for name, tensor in weights:            # on every rank, in the same order: iterating is collective
        ...

Every rank receives every tensor; the most it holds beside its own shards is one parameter (q, k, v count as one, and of
experts it is one expert's). The order is embedding, layers, final norm, output layer (left out when tied), with q, k, v
and gate, up side by side, and the experts of a layer behind one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.weights.names import EMBEDDING, OUTPUT, Entry, ModelShape, entry, layer_of, merge, table

if TYPE_CHECKING:
    from torch import nn
    from vllm.distributed.weight_transfer.base import WeightSource

    from oblr_megatron.model.qwen3 import Policy


class TensorMeta(NamedTuple):
    """What iteration will yield. Example: TensorMeta("model.norm.weight", torch.bfloat16, (1024,))"""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def metadata_of(shape: ModelShape, dtype: torch.dtype) -> list[TensorMeta]:
    """Names and shapes of a whole model in export order; needs no weights, only its config."""
    return [
        TensorMeta(name, dtype, size) for item in table(shape) for name, size in zip(item.hf, item.shapes, strict=True)
    ]


class MegatronWeights:
    """The current weights of a policy; every `iter()` is a fresh pass over what they are then.

    Without tensor parallelism a tensor may share its memory with the weights: use it before the next optimizer step,
    and do not write to it.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype | None = None) -> None:
        """`dtype` is what tensors are cast to before they travel; by default the weights' own."""
        self._policy = policy
        self._shape = ModelShape.of(policy.hf_config)
        self._dtype = dtype or policy.transformer_config.params_dtype

    def metadata(self) -> list[TensorMeta]:
        """What iteration yields, element for element; no communication."""
        return metadata_of(self._shape, self._dtype)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        own = self._own_parameters()
        for item in table(self._shape):
            yield from self._whole(item, own.get(item.hf))

    def _own_parameters(self) -> dict[tuple[str, ...], nn.Parameter]:
        """This stage's parameters by their Hugging Face names, without its copy of a tied embedding."""
        return {
            entry(name, self._shape).hf: parameter
            for name, parameter in self._policy.named_parameters()
            if not (self._shape.tied and name == OUTPUT)
        }

    @torch.no_grad()
    def _whole(self, item: Entry, parameter: nn.Parameter | None) -> list[tuple[str, Tensor]]:
        """Gather over tensor parallelism where the parameter is, broadcast to the other expert ranks and stages."""
        parallel = self._policy.parallel
        stage, owner = self._stage_of(item), self._expert_rank_of(item)
        assert (parameter is not None) == (stage == parallel.pp_rank and owner in (None, parallel.ep_rank)), (
            f"{item.megatron} belongs to pipeline stage {stage}, expert-parallel rank {owner}"
        )
        if parameter is not None:
            tensors = merge(item, self._shards(item, parameter.detach().to(self._dtype)), self._shape)
        else:
            tensors = [
                (name, torch.empty(size, dtype=self._dtype, device=parallel.device))
                for name, size in zip(item.hf, item.shapes, strict=True)
            ]
        tensors = [(name, tensor.contiguous()) for name, tensor in tensors]
        for _, tensor in tensors:
            if owner is not None and parallel.ep_size > 1 and stage == parallel.pp_rank:
                dist.broadcast(tensor, group_src=owner, group=parallel.ep_group)
            if parallel.pp_size > 1:
                dist.broadcast(tensor, src=parallel.stage_rank(stage), group=parallel.pp_group)
        return tensors

    def _shards(self, item: Entry, shard: Tensor) -> list[Tensor]:
        parallel = self._policy.parallel
        group = parallel.tp_group if item.expert is None else parallel.etp_group
        if item.cut == "replicated" or group.size() == 1:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(shards, shard.contiguous(), group=group)
        return shards

    def _expert_rank_of(self, item: Entry) -> int | None:
        """The expert-parallel rank that holds an expert; None for what is no expert's."""
        if item.expert is None:
            return None
        return item.expert // (self._shape.experts // self._policy.parallel.ep_size)

    def _stage_of(self, item: Entry) -> int:
        """The pipeline stage that holds the parameter; chunks of layers are dealt to the stages in turn."""
        parallel = self._policy.parallel
        layer = layer_of(item)
        if layer is not None:
            chunk = layer // (self._shape.layers // (parallel.pp_size * parallel.vp_size))
            return chunk % parallel.pp_size
        return 0 if item.megatron == EMBEDDING else parallel.pp_size - 1


def vllm_source(policy: Policy, dtype: torch.dtype | None = None) -> WeightSource:
    """The same stream as vLLM's own `WeightSource`, for its built-in transfer engines.

    vLLM is imported here and not above: the import takes seconds, and neither the export nor a push to an engine in
    another process needs it.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class VllmWeights(MegatronWeights, WeightSource):
        def metadata(self) -> list[ParamMeta]:  # type: ignore[override]
            return [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in super().metadata()]

    return VllmWeights(policy, dtype)
