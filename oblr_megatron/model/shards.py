"""The part of the reduced gradient that a rank holds, and that part's place in a checkpoint.

Without the distributed optimizer every replica has the whole sum. With it, megatron-core reduce-scatters: it cuts each
bucket of the gradient buffer into equal slices, one for each data-parallel rank (for experts, each rank with the same
experts). Slices ignore parameter boundaries. Outside its slice a rank's `main_grad` holds only its own contribution.

    spans = held(policy)                                   # parameter -> slice of the flattened parameter
    tensors = pieces(weight, "gradient_momentum", part, spans[parameter], alone=True)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

if TYPE_CHECKING:
    from torch import Tensor, nn

    from oblr_megatron.model.policy import Policy


def is_sharded(policy: Policy) -> bool:
    """Whether the reduced gradient and the optimizer's state are sharded over replicas."""
    return bool(policy.chunks[0].ddp_config.use_distributed_optimizer)


def held(policy: Policy) -> dict[nn.Parameter, slice]:
    """The slice of each flattened parameter for which this rank has the reduced gradient; possibly all or nothing.

    Example, 2 ranks and a bucket of 256 elements with one weight of 150: slice(0, 128) and slice(128, 150).
    """
    if not is_sharded(policy):
        return {parameter: slice(0, parameter.numel()) for _, parameter in policy.trained_parameters()}
    spans = {}
    for chunk in policy.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
            for parameter, (start, stop, bucket) in buffer.param_index_map.items():
                first, last = buffer.bucket_indices[bucket]
                low = first + rank * (last - first) // size
                high = first + (rank + 1) * (last - first) // size
                begin, end = (min(max(bound, start), stop) - start for bound in (low, high))
                spans[parameter] = slice(begin, end)
    return spans


def pieces(
    weight: ShardedTensor | ShardedTensorFactory, prefix: str, part: Tensor, span: slice, *, alone: bool
) -> dict[int, ShardedTensor]:
    """Cut `part`, which is slice `span` of the flattened shard, into rectangles of the whole tensor: numbered views.

    A checkpoint stores tensors by their position in the whole model, so that any layout can read it, with or without
    the distributed optimizer.

    Args:
        weight: the parameter in the model's sharded state dict.
        prefix: of the checkpoint key.
        part: [length of span], for example of a moment.
        span: slice of this rank's flattened shard of the parameter.
        alone: whether no other replica holds this part; otherwise every replica of the weight holds it.
    """
    views: list[ShardedTensor] = []
    offset = 0
    data = weight.data.data_ptr()
    for whole in weight.build() if isinstance(weight, ShardedTensorFactory) else [weight]:
        size = prod(whole.local_shape)
        assert whole.data.data_ptr() == data + offset * whole.data.element_size(), "parts must be contiguous"
        start, stop = (min(max(bound - offset, 0), size) for bound in (span.start, span.stop))
        flat = part[offset + start - span.start : offset + stop - span.start] if start < stop else part[:0]
        views += _rectangles_of(whole, f"{prefix}.{whole.key}", flat, start, alone=alone)
        offset += size
    assert offset == weight.data.numel(), "the parts must cover the whole shard"
    return dict(enumerate(views))  # not a list: megatron-core cannot merge lists that differ between ranks


def put_back(tensor: Tensor, loaded: Mapping[int, Tensor]) -> None:
    """Fill the tensor that `pieces` was called with from its loaded pieces."""
    parts = [loaded[index].flatten() for index in sorted(loaded)]
    if parts:
        tensor.copy_(torch.cat(parts).to(tensor.device).view_as(tensor))


def rectangles(start: int, stop: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Split `start:stop` of a flattened matrix into at most three rectangles (row, column, rows, columns), in order.

    Example, 5 columns: (3, 12) -> (0, 3, 1, 2), (1, 0, 1, 5), (2, 0, 1, 2)
    """
    while start < stop:
        row, column = divmod(start, columns)
        rows = 0 if column else (stop - start) // columns
        width = columns if rows else min(columns - column, stop - start)
        rows = rows or 1
        yield row, column, rows, width
        start += rows * width


def _rectangles_of(whole: ShardedTensor, key: str, flat: Tensor, start: int, *, alone: bool) -> list[ShardedTensor]:
    """`flat`, which starts at element `start` of this shard, as tensors with the whole tensor's axes."""
    assert len(whole.local_shape) <= 2, "weights must be vectors or matrices"
    columns = whole.local_shape[1] if len(whole.local_shape) == 2 else 1
    lead, views, position = (1,) * whole.prepend_axis_num, [], 0
    for row, column, rows, width in rectangles(start, start + len(flat), columns):
        shape = (*lead, rows, width)[: len(whole.global_shape)]
        shift = (*(0 for _ in lead), row, column)[: len(whole.global_shape)]
        piece = flat[position : position + rows * width].view(shape)
        position += rows * width
        views.append(
            replace(
                whole,
                key=key,
                data=piece,
                dtype=piece.dtype,
                local_shape=shape,
                global_offset=tuple(a + b for a, b in zip(whole.global_offset, shift, strict=True)),
                axis_fragmentations=None,  # pieces are not equal chunks
                replica_id=(*whole.replica_id[:-1], 0) if alone else whole.replica_id,
                prepend_axis_num=0,
            )
        )
    return views
