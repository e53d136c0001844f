"""The tokens of a microbatch that a rank works on, and the padding that makes the sequence divide.

Under context parallelism megatron-core cuts each sequence into 2 cp chunks of equal length. Rank r holds chunks r and
2 cp - 1 - r, an early and a late one, so that causal attention costs every rank the same:

    cp = 2, a sequence of 8:   rank 0 has tokens 0 1 | 6 7,   rank 1 has 2 3 | 4 5

Packed samples are each cut this way. Sequence parallelism splits a rank's tokens again, inside the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import functional

from oblr_megatron.padding import Padding
from oblr_megatron.runtime.device_copy import to_device
from oblr_megatron.types import TokenRows

if TYPE_CHECKING:
    from oblr_megatron.model.parallel import Parallel

Batch = TypeVar("Batch", bound=TokenRows)
"""A dataclass: `MicroBatch`, or `TokenBatch` of the norms' library."""
OF_LOSS = ("recorded_ids", "recorded_logprobs")


@dataclass
class PackedRows(PackedSeqParams):
    """megatron-core's parameters of packed samples, with their lengths on the host: no layer has to wait for a GPU."""

    lengths: tuple[int, ...] = ()  # of whole samples, before the cut over context-parallel ranks


def chunks_of(cp_rank: int, cp_size: int) -> tuple[int, ...]:
    """The chunks of a sequence that a rank holds, in order: chunks_of(1, 4) == (1, 6), of 8; (0,) for cp_size 1."""
    return (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank)


def local_part(parallel: Parallel, batch: Batch, padding: Padding) -> Batch:
    """Pad a microbatch as the layout needs it and take this context-parallel rank's tokens, in each field [b, t, ...].

    Padding has mask False; at the end of the row it belongs to the last sample. Position j of the result still
    predicts `labels[:, j]`. `cu_seqlens` counts this rank's tokens, 1 / cp_size of the padded ones.
    """
    length = batch.input_ids.shape[1]
    bounds = [0, length] if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    assert bounds[-1] == length, f"cu_seqlens ends at {bounds[-1]}, but the row has {length} tokens"
    padded = _padded_lengths(padding, bounds)
    if parallel.cp_size == 1 and sum(padded) == length:
        return batch
    source = torch.tensor(_source_positions(parallel, bounds, padded))

    def taken(values: Tensor) -> Tensor:
        blank = values.new_full((), -1 if values.dim() > 2 else 0)  # no route
        longer = torch.cat((values, blank.expand(len(values), 1, *values.shape[2:])), dim=1)
        return longer.index_select(1, source.to(values.device))

    cu_seqlens = batch.cu_seqlens
    if cu_seqlens is not None:
        cu_seqlens = functional.pad(torch.tensor(padded).cumsum(0) // parallel.cp_size, (1, 0)).to(cu_seqlens)
    return _changed(batch, cu_seqlens, {name: taken(values) for name, values in _of_tokens(batch).items()})


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The microbatch on a device, where a pass holds all its microbatches.

    The bounds of packed samples, the routes and the recorded tokens (`for_loss`) stay in host memory, and `counted`,
    which is set.
    """
    kept, bounds = ("cu_seqlens", "routes", *OF_LOSS), batch.cu_seqlens
    values = {name: to_device(value, device) for name, value in _tensors(batch).items() if name not in kept}
    return _changed(batch, None if bounds is None else bounds.cpu(), values | {"counted": counted_tokens(batch)})


def for_loss(batch: Batch, device: torch.device) -> Batch:
    """The microbatch with its recorded tokens on a device, too: up to a thousand for each token, read by the loss."""
    values = {name: tensor for name in OF_LOSS if (tensor := getattr(batch, name, None)) is not None}
    if not values:
        return batch
    return _changed(batch, batch.cu_seqlens, {name: to_device(value, device) for name, value in values.items()})


def counted_tokens(batch: TokenRows) -> Tensor:
    """`TokenRows.counted`: noted, or from the mask, for which the host waits if it is on a GPU."""
    return batch.mask.flatten().cpu().nonzero().flatten() if batch.counted is None else batch.counted


def single_samples(batch: Batch) -> list[Batch]:
    """One microbatch for each sample, which is a row. Fields of [n] are cut too."""
    samples = batch.num_samples
    if samples == 1 and batch.cu_seqlens is None:
        return [batch]
    parts = []
    for index in range(samples):
        row, columns = slice(index, index + 1), slice(None)
        if batch.cu_seqlens is not None:
            row, columns = slice(None), slice(*batch.cu_seqlens[index : index + 2].tolist())
        values = {name: tensor[row, columns] for name, tensor in _of_tokens(batch).items()}
        others = {name: value for name, value in _tensors(batch).items() if value.shape == (samples,)}
        parts.append(_changed(batch, None, values | {name: value[index : index + 1] for name, value in others.items()}))
    return parts


def _tensors(batch: Any) -> dict[str, Tensor]:
    """The fields of a dataclass that are tensors."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _of_tokens(batch: TokenRows) -> dict[str, Tensor]:
    """The fields with one value a token, or several: routes and recorded tokens."""
    shape = batch.input_ids.shape
    return {name: value for name, value in _tensors(batch).items() if value.shape[:2] == shape}


def _changed(batch: Any, cu_seqlens: Tensor | None, values: dict[str, Tensor]) -> Any:
    return replace(batch, cu_seqlens=cu_seqlens, **values)


def packed_params(parallel: Parallel, batch: TokenRows, device: torch.device) -> PackedRows | None:
    """megatron-core's parameters of a packed microbatch from `local_part`; None for rows.

    Lengths are those of whole samples, before the cut over context-parallel ranks. They include a sample's padding: it
    follows every real token, so that the causal mask hides it. `device` is where the layers read the bounds.
    """
    if batch.cu_seqlens is None:
        return None
    bounds = batch.cu_seqlens * parallel.cp_size
    lengths = tuple(bounds.diff().tolist())
    bounds = to_device(bounds, device)
    longest = max(lengths)
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
    )


def _padded_lengths(padding: Padding, bounds: Sequence[int]) -> list[int]:
    """The padded length of each sample, or of all rows."""
    multiple = padding.sample
    lengths = [-(-(stop - start) // multiple) * multiple for start, stop in pairwise(bounds)]
    lengths[-1] += -sum(lengths) % padding.row
    return lengths


def _source_positions(parallel: Parallel, bounds: Sequence[int], padded: Sequence[int]) -> list[int]:
    """The position in the microbatch of each of this rank's tokens; one past the end for padding."""
    chunks, blank = chunks_of(parallel.cp_rank, parallel.cp_size), bounds[-1]
    sources: list[int] = []
    for (start, stop), length in zip(pairwise(bounds), padded, strict=True):
        size = length // (len(chunks) * parallel.cp_size)
        for chunk in chunks:
            first = start + chunk * size
            sources += [position if position < stop else blank for position in range(first, first + size)]
    return sources
