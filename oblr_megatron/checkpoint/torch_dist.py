"""Writes a torch_dist checkpoint layer by layer from a single process.

    write_pieces(state, pieces, load, directory)        # load(piece) returns the tensor when it is written

The format is megatron-core's: torch.distributed.checkpoint writes it with megatron-core's planner (save_planner.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.strategies.torch import mcore_to_pyt_state_dict
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from oblr_megatron.checkpoint.pieces import Piece, State, by_layer
from oblr_megatron.checkpoint.save_planner import LinearPlanner, alone, stored_shape
from oblr_megatron.checkpoint.torch_files import TensorFiles, plain_files, save_common

METADATA = ".metadata"
Load = Callable[[Piece], Tensor]
Place = tuple[str, tuple[int, ...]]  # key and offset


def write_pieces(state: State, pieces: Sequence[Piece], load: Load, directory: Path) -> None:
    """Write and sync a model's checkpoint: one file per layer, metadata last.

    Args:
        state: see `sharded_state`; non-tensor objects are written unchanged.
        pieces: the tensors of `state`.
        load: returns the tensor of a piece in the piece's dtype.
        directory: exists and is empty.

    Raises:
        OSError: writing failed.
    """
    stored: dict[str, list[ShardedBase]] = defaultdict(list)
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            stored[value.key].append(alone(value))
        else:
            stored[value.unique_key].append(value)
    files = {_place(piece.sharded): number for number, group in enumerate(by_layer(pieces)) for piece in group}
    by_place = {_place(piece.sharded): piece for piece in pieces}

    def resolve(place: Place) -> Tensor:
        piece = by_place[place]
        return load(piece).view(stored_shape(piece.sharded))

    planner = _LazyPlanner(resolve, list(by_place))
    try:
        with plain_files():
            dcp.save(mcore_to_pyt_state_dict(stored), storage_writer=_LayerFiles(directory, files), planner=planner)
    except dcp.CheckpointException as error:  # torch's exception about a rank
        raise next(iter(error.failures.values()))[0] from error
    save_common({}, directory)


class _LazyPlanner(LinearPlanner):
    """Loads tensors when they are written, in the order of `places`."""

    def __init__(self, load: Callable[[Place], Tensor], places: Sequence[Place]) -> None:
        super().__init__()
        self._load = load
        self._order = {place: number for number, place in enumerate(places)}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = sorted(plan.items, key=lambda item: self._order.get(_place_of(item.index), -1))
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> object:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self._load(_place_of(write_item.index))


class _LayerFiles(TensorFiles):
    """Writes each layer to its own file, as a separate rank would, and frees its tensors afterwards."""

    def __init__(self, directory: Path, files: Mapping[Place, int]) -> None:
        super().__init__(directory)
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


def _place(sharded: ShardedTensor) -> Place:
    return sharded.key, tuple(sharded.global_offset)


def _place_of(index: MetadataIndex) -> Place:
    return index.fqn, tuple(index.offset or ())
