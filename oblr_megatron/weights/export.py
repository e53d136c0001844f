"""The policy's weights as a stream of whole Hugging Face tensors, gathered a layer at a time.

    weights = MegatronWeights(policy, dtype=torch.bfloat16)
    for name, tensor in weights:            # collective: on every rank, in the same order
        ...
    for name, view in weights.views():      # the same without copies; a view is valid until the next one
        ...

Every rank receives every tensor. A layer takes one message for its parameters outside experts and one for its experts,
or more if they exceed `piece_bytes` (weights/pieces.py). With pipeline parallelism each has a second message, which
carries the owner stage's shards to the other stages. In addition to its own shards a rank holds at most one piece.

    owner stage     copy (and cast) the shards into this rank's row of the piece [ranks, elements]
    all stages      broadcast of that row, over pp
    all ranks       all-gather of the rows, over tp, or over the ranks that share a layer's experts (ep x etp);
                    with gloo a broadcast of each row

The order is: embedding, layers, final norm, output layer (none if tied). The tensors of a parameter are neighbours
(q, k, v; gate, up), and so are the experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.families import EMBEDDING, OUTPUT
from oblr_megatron.memory.buffer_sizes import PIECE_BYTES
from oblr_megatron.model.lora.adapters import sites_of
from oblr_megatron.weights.names import Entry, ModelShape, entry, layer_of, table, views
from oblr_megatron.weights.pieces import GatherPiece, pieces

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from oblr_megatron.model.policy import Policy

Own = dict[tuple[str, ...], "nn.Parameter"]
"""Hugging Face names -> this rank's shard."""


class TensorMeta(NamedTuple):
    """Describes one tensor of the iteration. Example: TensorMeta("model.norm.weight", torch.bfloat16, (1024,))"""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def metadata_of(items: Iterable[Entry], dtype: torch.dtype) -> list[TensorMeta]:
    """Names and shapes of the parameters' tensors, in their order."""
    return [TensorMeta(name, dtype, size) for item in items for name, size in zip(item.hf, item.shapes, strict=True)]


class MegatronWeights:
    """The current weights of a policy; every `iter()` is a new pass over their values at that time.

    A tensor that no other rank has a part of may share memory with the weights: use it before the next optimizer step,
    and do not write to it.
    """

    def __init__(
        self,
        policy: Policy,
        dtype: torch.dtype | None = None,
        *,
        merged: bool = True,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Args:
        policy: the model.
        dtype: tensors are cast to it before they are sent; by default the weights' own.
        merged: whether adapters are added to the weights.
        piece_bytes: that are gathered at a time; at least one parameter is.
        """
        self._policy = policy
        self._sites = sites_of(policy) if merged else {}
        self._shape = ModelShape.of(policy.hf_config)
        self._dtype = dtype or policy.transformer_config.params_dtype
        parallel = policy.parallel
        self._pieces = pieces(
            self._shape,
            tp=parallel.tp_size,
            ep=parallel.ep_size,
            etp=parallel.etp_size,
            padded_vocab=policy.padded_vocab_size,
            budget=piece_bytes // self._dtype.itemsize,
        )

    def metadata(self) -> list[TensorMeta]:
        """The tensors that iteration yields, in its order; no communication."""
        return metadata_of((item for piece in self._pieces for item in piece.items), self._dtype)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for item, stacked, shared in self._stream():
            for (name, view), size in zip(views(item, stacked, self._shape), item.shapes, strict=True):
                tensor = view.to(self._dtype).reshape(size)
                reused = shared and tensor.data_ptr() == view.data_ptr()
                yield name, tensor.clone() if reused else tensor

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """The same tensors without copies, for a caller that copies each one before it takes the next.

        A view has the tensor's elements in row-major order. It may have more dimensions, be strided, and have the
        weights' own dtype instead of the declared one. Its memory is reused for the next view.
        """
        for item, stacked, _ in self._stream():
            yield from views(item, stacked, self._shape)

    @torch.no_grad()
    def _stream(self) -> Iterator[tuple[Entry, Tensor, bool]]:
        """Each parameter's shards [ranks, *shard], and whether their memory is that of later pieces too."""
        names = {item.megatron: item.hf for item in table(self._shape)}
        own: Own = {
            # The usual names; `entry` also knows those of fused norms and of grouped experts.
            names[name] if name in names else entry(name, self._shape).hf: parameter
            for name, parameter in self._policy.base_parameters()
            if not (self._shape.tied and name == OUTPUT)  # the last stage's copy of the embedding
        }
        largest = max((piece.numel for piece in self._pieces if self._travels(piece)), default=0)
        memory = torch.empty(largest, dtype=self._dtype, device=self._policy.parallel.device)
        for piece in self._pieces:
            if self._travels(piece):
                yield from ((item, stacked, True) for item, stacked in self._gathered(piece, own, memory))
            else:
                yield from ((item, self._shard(own[item.hf])[None], False) for item in piece.items)

    def _gathered(self, piece: GatherPiece, own: Own, memory: Tensor) -> Iterator[tuple[Entry, Tensor]]:
        """The piece's parameters with all their shards, in `memory`. Collective."""
        parallel = self._policy.parallel
        group = parallel.expert_group if piece.experts else parallel.tp_group
        rows = memory[: piece.numel].view(group.size(), -1)
        row, sizes = rows[group.rank()], [prod(shape) for shape in piece.shapes]
        stage = stage_of(self._policy, piece.owners[0][0])
        if stage == parallel.pp_rank:
            for item, part in zip(piece.owners[group.rank() // piece.ranks], row.split(sizes), strict=True):
                shard = self._shard(own[item.hf])
                part.view(shard.shape).copy_(shard)
        if parallel.pp_size > 1:
            dist.broadcast(row, group_src=stage, group=parallel.pp_group)
        share_rows(rows, group, dist.get_backend(group))
        for items, shards in zip(piece.owners, rows.split(piece.ranks), strict=True):
            for item, part, shape in zip(items, shards.split(sizes, dim=1), piece.shapes, strict=True):
                yield item, part.unflatten(1, shape)

    def _shard(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of a weight, with its adapter if there is one."""
        site = self._sites.get(parameter)
        return parameter.detach() if site is None else site.merged()

    def _travels(self, piece: GatherPiece) -> bool:
        """Whether another rank needs or has a part of the piece."""
        return self._policy.parallel.pp_size * len(piece.owners) * piece.ranks > 1


def stage_of(policy: Policy, item: Entry) -> int:
    """The pipeline stage that holds a parameter; chunks of layers are assigned to the stages in turn."""
    parallel, config, layer = policy.parallel, policy.transformer_config, layer_of(item)
    if layer is not None:
        ends = config.account_for_embedding_in_pipeline_split  # embedding and loss count as a layer each
        of_chunk = (config.num_layers + 2 * ends) // (parallel.pp_size * parallel.vp_size)
        return int((layer + ends) // of_chunk % parallel.pp_size)
    return 0 if item.megatron == EMBEDDING else parallel.pp_size - 1


def share_rows(rows: Tensor, group: ProcessGroup, backend: str) -> None:
    """All-gather in place: every rank gives its row, and receives the others. Collective.

    Args:
        rows: [ranks, elements], contiguous.
        group: of the ranks.
        backend: "nccl" or "gloo". gloo's all-gather copies everything twice more. Broadcasts of all rows at once move
            as many bytes.
    """
    if group.size() == 1:
        return
    if backend == "nccl":
        dist.all_gather_into_tensor(rows.view(-1), rows[group.rank()], group=group)
        return
    sent = [dist.broadcast(row, group_src=rank, group=group, async_op=True) for rank, row in enumerate(rows)]
    for work in sent:
        work.wait()
