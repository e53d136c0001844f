"""A torch_dist checkpoint written and read a layer at a time, by one process with a process group of its own.

    write_pieces(state, pieces, load, directory)        # load(piece) makes the tensor when its turn comes
    reader = PieceReader(directory)
    for tensors in map(reader.read, by_layer(reader.find(...))):
        ...

The format is megatron-core's: torch.distributed.checkpoint writes and reads it, with megatron-core's own planners.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.serialization import get_default_save_common_strategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from oblr_megatron.checkpoint.hf_write import sync
from oblr_megatron.checkpoint.pieces import Piece, State, by_layer
from oblr_megatron.checkpoint.store import MEND, CheckpointError
from oblr_megatron.weights.names import ModelShape

BACKEND, VERSION = "torch_dist", 1
METADATA = ".metadata"
Load = Callable[[Piece], Tensor]
Place = tuple[str, tuple[int, ...]]  # key and offset


def write_pieces(state: State, pieces: Sequence[Piece], load: Load, directory: Path) -> None:
    """Write a model's checkpoint: one file a layer, metadata last; everything is on the disk afterwards.

    Args:
        state: see `sharded_state`; its objects are written as they are.
        pieces: its tensors.
        load: makes the tensor of a piece, in the piece's dtype.
        directory: exists, and is empty.

    Raises:
        OSError: the file system refuses.
    """
    stored: dict[str, list[ShardedBase]] = defaultdict(list)
    for value in nested_values(state):
        stored[value.key if isinstance(value, ShardedTensor) else value.unique_key].append(value)
    files = {_place(piece.sharded): number for number, group in enumerate(by_layer(pieces)) for piece in group}
    by_place = {_place(piece.sharded): piece for piece in pieces}

    def resolve(place: Place) -> Tensor:
        piece = by_place[place]
        return load(piece).view(_stored_shape(piece.sharded))

    planner = _LazyPlanner(resolve, list(by_place))
    with _without_crc32(), _causes():
        dcp.save(
            mcore_to_pyt_state_dict(stored),
            storage_writer=_LayerFiles(directory, files),
            planner=planner,
        )
    get_default_save_common_strategy().save_common({}, str(directory))
    save_config(CheckpointingConfig(BACKEND, VERSION), str(directory))
    for name in ("common.pt", "metadata.json"):
        sync(directory / name)


class _LazyPlanner(MCoreSavePlanner):
    """Makes tensors when they are written, in the order of `places`."""

    def __init__(self, load: Callable[[Place], Tensor], places: Sequence[Place]) -> None:
        super().__init__(flatten_state_dict=False)
        self._load = load
        self._order = {place: number for number, place in enumerate(places)}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = sorted(plan.items, key=lambda item: self._order.get(_place_of(item.index), -1))
        self.plan = replace(plan, items=items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Without torch's search for overlaps, which compares each of the experts with each other: minutes.

        Pieces of one size that begin at different multiples of it, as many as fill the tensor, do not overlap.
        """
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        for key, stored in self.metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                (sizes,) = {chunk.sizes for chunk in stored.chunks}
                assert len({chunk.offsets for chunk in stored.chunks}) * prod(sizes) == prod(stored.size), key
        return self.global_plan, self.metadata

    def resolve_data(self, write_item: WriteItem) -> object:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self._load(_place_of(write_item.index))


class _File(io.FileIO):
    """A file that remembers why it could not be written: torch only tells of a position that it did not expect."""

    failure: OSError | None = None

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.failure = error
            raise


class _Files(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        file = _File(path, mode)
        try:
            with io.BufferedWriter(file) as stream:
                yield stream
        except RuntimeError as error:
            if file.failure is not None:
                raise OSError(file.failure.errno, file.failure.strerror, str(path)) from error
            raise


class _LayerFiles(dcp.FileSystemWriter):
    """Gives each layer a file, as if a rank of its own had written it; its tensors are let go when it is written."""

    def __init__(self, directory: Path, files: Mapping[Place, int]) -> None:
        super().__init__(directory, sync_files=True, per_thread_copy_ahead=0)  # 0: nothing is made ahead of its turn
        self.fs = _Files()
        self._files = files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        by_file: dict[int, list[WriteItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._files.get(_place_of(item.index), 0)].append(item)
        results: list[WriteResult] = []
        for number, items in by_file.items():
            prefix = replace(plan.storage_data, prefix=f"__{number}_")
            results += super().write_data(replace(plan, items=items, storage_data=prefix), planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


class PieceReader(dcp.FileSystemReader):
    """The tensors of a checkpoint, read piece by piece.

    Raises:
        CheckpointError: there is no such checkpoint, its metadata cannot be read, or a file is shorter than it says.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        self.whole = self._read_whole()
        self._chunks: dict[str, dict[tuple[int, ...], list[int]]] = {}
        self._part = self.whole

    def find(self, pieces: Sequence[Piece], shape: ModelShape) -> list[Piece]:
        """The pieces as they are stored: in the checkpoint's dtypes and with its padded vocabulary.

        Raises:
            CheckpointError: a tensor is missing, or of another shape.
        """
        return [self._find(piece, shape) for piece in pieces]

    def files(self, pieces: Sequence[Piece]) -> list[str]:
        """The files that hold any of them."""
        keys = {piece.sharded.key for piece in pieces}
        return sorted({info.relative_path for index, info in self._storage().items() if index.fqn in keys})

    def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """The tensors of some pieces that `find` has returned.

        Raises:
            CheckpointError: a file cannot be read.
        """
        shards = [_alone(piece.sharded) for piece in pieces]
        stored: dict[str, list[ShardedTensor]] = defaultdict(list)
        for shard in shards:
            stored[shard.key].append(shard)
        self._part = self._metadata_of([piece.sharded for piece in pieces])
        planner = MCoreLoadPlanner(allow_shape_mismatch_sharded_tensors={})
        try:
            dcp.load(mcore_to_pyt_state_dict(stored, is_loading=True), storage_reader=self, planner=planner)
        except dcp.CheckpointException as error:
            raise self._damaged(pieces, error) from error
        return [_filled(shard, piece.sharded.local_shape) for shard, piece in zip(shards, pieces, strict=True)]

    def read_metadata(self, *_args: object, **_options: object) -> Metadata:
        """What the pieces under way are stored in: torch looks through all chunks of a tensor for each piece."""
        return self._part

    def _find(self, piece: Piece, shape: ModelShape) -> Piece:
        sharded, stored = piece.sharded, self.whole.state_dict_metadata.get(piece.sharded.key)
        if not isinstance(stored, TensorStorageMetadata):
            raise self._error(f"the checkpoint has no tensor {sharded.key!r}")
        size, wanted = tuple(stored.size), tuple(sharded.global_shape)
        if piece.item.cut == "vocab" and len(size) == 2 and size[0] >= shape.vocab and size[1:] == wanted[1:]:
            sharded = replace(sharded, global_shape=size, local_shape=size, data=None)
        elif size != wanted:
            raise self._error(f"{sharded.key!r} has shape {list(size)}, the model's config.json says {list(wanted)}")
        return replace(piece, sharded=replace(sharded, dtype=stored.properties.dtype, data=None))

    def _metadata_of(self, shards: Sequence[ShardedTensor]) -> Metadata:
        """Metadata with only the chunks of the shards' layers and experts."""
        wanted: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for shard in shards:
            wanted[shard.key].add(tuple(shard.global_offset[: shard.prepend_axis_num]))
        kept: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for shard in {shard.key: shard for shard in shards}.values():
            stored = self._stored(shard.key)
            found = self._chunks_of(shard.key, shard.prepend_axis_num)
            chunks = [
                stored.chunks[number] for leading in sorted(wanted[shard.key]) for number in found.get(leading, ())
            ]
            kept[shard.key] = replace(stored, chunks=chunks)
        return replace(self.whole, state_dict_metadata=kept)

    def _chunks_of(self, key: str, leading: int) -> dict[tuple[int, ...], list[int]]:
        """The numbers of a tensor's chunks by layer, or by layer and expert."""
        if key not in self._chunks:
            found: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for number, chunk in enumerate(self._stored(key).chunks):
                found[tuple(chunk.offsets[:leading])].append(number)
            self._chunks[key] = found
        return self._chunks[key]

    def _read_whole(self) -> Metadata:
        file = self.directory / METADATA
        try:
            metadata = super().read_metadata()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"not a torch_dist checkpoint: {METADATA} is missing",
                where=str(self.directory),
                mend="give the directory of one checkpoint, e.g. RUN_DIR/checkpoints/step_00000010",
            ) from error
        except (
            OSError,
            EOFError,
            pickle.UnpicklingError,
            ValueError,
            LookupError,
            AttributeError,
            ImportError,
        ) as error:
            raise CheckpointError(f"the file is damaged: {error}", where=str(file), mend=MEND) from error
        self._check_sizes(metadata)
        return metadata

    def _check_sizes(self, metadata: Metadata) -> None:
        ends: dict[str, int] = defaultdict(int)
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
        for name, end in ends.items():
            file = self.directory / name
            if not file.is_file():
                raise CheckpointError("the file is missing", where=str(file), mend=MEND)
            if file.stat().st_size < end:
                raise CheckpointError(
                    f"the file is cut off: {file.stat().st_size} bytes, {METADATA} describes {end}",
                    where=str(file),
                    mend=MEND,
                )

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(
            what,
            where=str(self.directory),
            mend="give a checkpoint of a Qwen3 GPTModel and the config.json it belongs to",
        )

    def _damaged(self, pieces: Sequence[Piece], error: dcp.CheckpointException) -> CheckpointError:
        cause = next(iter(error.failures.values()))[0]
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        return CheckpointError(
            f"cannot read {pieces[0].item.megatron!r} or what follows it: {reason}",
            where=str(self.directory),
            mend=MEND,
        )

    def _storage(self) -> Mapping[MetadataIndex, Any]:
        """Where each chunk is: relative_path, offset, length."""
        storage: Mapping[MetadataIndex, Any] = self.whole.storage_data
        return storage

    def _stored(self, key: str) -> TensorStorageMetadata:
        stored = self.whole.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata), f"{key} is no tensor"
        return stored


def _alone(sharded: ShardedTensor) -> ShardedTensor:
    """The same piece with layer and expert among its own dimensions: megatron-core can read it without the others."""
    local = _stored_shape(sharded)
    return ShardedTensor(
        sharded.key, None, sharded.dtype, local, sharded.global_shape, sharded.global_offset, axis_fragmentations=None
    )


def _filled(shard: ShardedTensor, shape: tuple[int, ...]) -> Tensor:
    assert shard.data is not None, f"{shard.key} was read"
    return shard.data.view(shape)


def _stored_shape(sharded: ShardedTensor) -> tuple[int, ...]:
    return (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)


def _place(sharded: ShardedTensor) -> Place:
    return sharded.key, tuple(sharded.global_offset)


def _place_of(index: MetadataIndex) -> Place:
    return index.fqn, tuple(index.offset or ())


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Tensors are written without checksums of their own: the manifest has one of every file."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


@contextmanager
def _causes() -> Iterator[None]:
    """What went wrong in a save itself, instead of torch's exception about a rank."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
