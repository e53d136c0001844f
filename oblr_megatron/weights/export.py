"""The policy's weights as a stream of whole Hugging Face tensors, gathered one parameter at a time.

    weights = MegatronWeights(policy, dtype=torch.bfloat16)
    for name, tensor in weights:            # on every rank, in the same order: iterating is collective
        ...

Every rank receives every tensor; the most it holds beside its own shards is one parameter (q, k, v count as one).
The order is embedding, layers, final norm, output layer (left out when tied), with q, k, v and gate, up side by side.
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
        """Gather over tensor parallelism on the stage that owns the parameter, broadcast to the other stages."""
        parallel = self._policy.parallel
        stage = self._stage_of(item)
        if stage == parallel.pp_rank:
            assert parameter is not None, f"pipeline stage {stage} does not hold {item.megatron}"
            tensors = merge(item, self._shards(item, parameter.detach().to(self._dtype)), self._shape)
        else:
            tensors = [
                (name, torch.empty(size, dtype=self._dtype, device=parallel.device))
                for name, size in zip(item.hf, item.shapes, strict=True)
            ]
        tensors = [(name, tensor.contiguous()) for name, tensor in tensors]
        if parallel.pp_size > 1:
            for _, tensor in tensors:
                dist.broadcast(tensor, src=parallel.stage_rank(stage), group=parallel.pp_group)
        return tensors

    def _shards(self, item: Entry, shard: Tensor) -> list[Tensor]:
        parallel = self._policy.parallel
        if item.cut == "replicated" or parallel.tp_size == 1:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(parallel.tp_size)]
        dist.all_gather(shards, shard.contiguous(), group=parallel.tp_group)
        return shards

    def _stage_of(self, item: Entry) -> int:
        layer = layer_of(item)
        if layer is not None:
            return layer // (self._shape.layers // self._policy.parallel.pp_size)
        return 0 if item.megatron == EMBEDDING else self._policy.parallel.pp_size - 1


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
