"""Reads the tensors of a torch_dist checkpoint one by one, whatever layout wrote it.

    reader = PieceReader(directory)
    for piece in reader.find(pieces_of(state, shape), shape):
        tensor = reader.read(piece)

torch's own loading would hold each tensor twice and search the chunks of all layers and experts for each tensor.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from oblr_megatron.checkpoint.distributed import EXTRA_STATE
from oblr_megatron.checkpoint.pieces import Piece
from oblr_megatron.checkpoint.save_planner import stored_shape
from oblr_megatron.checkpoint.store import FIX, CheckpointError
from oblr_megatron.checkpoint.torch_dist import METADATA
from oblr_megatron.weights.names import ModelShape

DAMAGED = (OSError, EOFError, pickle.UnpicklingError, ValueError, LookupError, AttributeError, ImportError)
"""Errors that unpickling a damaged file raises."""
MODEL = ("embedding.", "decoder.", "output_layer.")
"""First parts of the names of a GPTModel's own tensors; those of an optimizer begin differently."""


class PieceReader(FileSystemReader):
    """Reads a checkpoint piece by piece.

    Raises:
        CheckpointError: the checkpoint does not exist, its metadata is damaged, or a file is truncated.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        self.whole = self._read_whole()
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}  # by key, layer and expert

    def find(self, pieces: Sequence[Piece], shape: ModelShape) -> list[Piece]:
        """The pieces with the checkpoint's dtypes and padded vocabulary.

        Raises:
            CheckpointError: a tensor is missing, has another shape, or is a weight that no piece holds.
        """
        completed = [self._find(piece, shape) for piece in pieces]
        # a tied output layer has no key of its own: megatron-core stores it once
        weights = {key for key in self.whole.state_dict_metadata if key.startswith(MODEL) and EXTRA_STATE not in key}
        unknown = weights - {piece.sharded.key for piece in completed}
        if unknown:
            raise self._error(
                f"the checkpoint has {len(unknown)} tensors that config.json does not imply, {min(unknown)!r} first"
            )
        return completed

    def files(self, pieces: Sequence[Piece]) -> list[str]:
        """The files that hold any of the pieces."""
        keys = {piece.sharded.key for piece in pieces}
        return sorted({info.relative_path for index, info in self.whole.storage_data.items() if index.fqn in keys})

    def read(self, piece: Piece) -> Tensor:
        """The tensor of a piece from `find`, assembled from the stored chunks.

        Raises:
            CheckpointError: a file cannot be read, or the chunks do not fill the piece.
        """
        wanted = piece.sharded
        start, size = tuple(wanted.global_offset), stored_shape(wanted)
        whole: Tensor | None = None
        filled = 0
        for chunk in self._chunks_of(wanted):
            common = _overlap(start, size, chunk)
            if any(low >= high for low, high in common):
                continue
            tensor = self._load(MetadataIndex(wanted.key, chunk.offsets))
            filled += prod(high - low for low, high in common)
            if (tuple(chunk.offsets), tuple(tensor.shape)) == (start, size):
                whole = tensor  # no second copy, which matters for an embedding
                continue
            whole = torch.empty(size, dtype=wanted.dtype) if whole is None else whole
            whole[_slices(common, start)] = tensor[_slices(common, chunk.offsets)]
        if whole is None or filled != prod(size):
            raise self._error(f"only {filled} of {prod(size)} elements of {wanted.key!r} are stored")
        return whole.view(wanted.local_shape)

    def _load(self, index: MetadataIndex) -> Tensor:
        info = self.whole.storage_data[index]
        file = self.directory / info.relative_path
        try:
            with file.open("rb") as stream:
                tensor: Tensor = torch.load(self._slice_file(stream, info), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"cannot read {index.fqn!r}: {reason}", where=str(file), fix=FIX) from error
        return tensor

    def _find(self, piece: Piece, shape: ModelShape) -> Piece:
        sharded, stored = piece.sharded, self.whole.state_dict_metadata.get(piece.sharded.key)
        if not isinstance(stored, TensorStorageMetadata):
            raise self._error(f"the checkpoint has no tensor {sharded.key!r}")
        size, wanted = tuple(stored.size), tuple(sharded.global_shape)
        if piece.item.cut == "vocab" and len(size) == 2 and size[0] >= shape.vocab and size[1:] == wanted[1:]:
            sharded = replace(sharded, global_shape=size, local_shape=size, data=None)
        elif size != wanted:
            raise self._error(f"{sharded.key!r} has shape {list(size)}, but config.json implies {list(wanted)}")
        return replace(piece, sharded=replace(sharded, dtype=stored.properties.dtype, data=None))

    def _chunks_of(self, wanted: ShardedTensor) -> Sequence[ChunkStorageMetadata]:
        """The chunks of the tensor that belong to the same layer and expert."""
        leading = wanted.prepend_axis_num
        if wanted.key not in self._chunks:
            chunks: dict[tuple[int, ...], list[ChunkStorageMetadata]] = defaultdict(list)
            stored: Any = self.whole.state_dict_metadata[wanted.key]  # a tensor, see `_find`
            for chunk in stored.chunks:
                chunks[tuple(chunk.offsets[:leading])].append(chunk)
            self._chunks[wanted.key] = chunks
        return self._chunks[wanted.key].get(tuple(wanted.global_offset[:leading]), ())

    def _read_whole(self) -> Metadata:
        """The metadata, after a check that every file has the length that it implies."""
        file = self.directory / METADATA
        try:
            metadata = super().read_metadata()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"not a torch_dist checkpoint: {METADATA} is missing",
                where=str(self.directory),
                fix="give the directory of one checkpoint, e.g. RUN_DIR/checkpoints/step_00000010",
            ) from error
        except DAMAGED as error:
            raise CheckpointError(f"the file is damaged: {error}", where=str(file), fix=FIX) from error
        ends: dict[str, int] = defaultdict(int)
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
        for name, end in ends.items():
            file = self.directory / name
            if not file.is_file():
                raise CheckpointError("the file is missing", where=str(file), fix=FIX)
            if file.stat().st_size < end:
                what = f"the file is cut off: {file.stat().st_size} bytes, {METADATA} implies {end}"
                raise CheckpointError(what, where=str(file), fix=FIX)
        return metadata

    def _error(self, what: str) -> CheckpointError:
        fix = "give a checkpoint of a GPTModel with its own config.json"
        return CheckpointError(what, where=str(self.directory), fix=fix)


Bounds = list[tuple[int, int]]
"""First index and end index (exclusive) of each dimension."""


def _overlap(start: Sequence[int], size: Sequence[int], chunk: ChunkStorageMetadata) -> Bounds:
    """The overlap of a piece and a chunk, in indices of the whole tensor; empty if any first index >= end index."""
    return [
        (max(own, other), min(own + extent, other + length))
        for own, extent, other, length in zip(start, size, chunk.offsets, chunk.sizes, strict=True)
    ]


def _slices(common: Bounds, origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low - own, high - own) for (low, high), own in zip(common, origin, strict=True))
