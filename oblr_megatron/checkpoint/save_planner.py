"""Plans a save of megatron-core's tensors in time linear in the number of their pieces.

    tensors = mcore_to_pyt_state_dict({key: [alone(piece) for piece in pieces]})
    dcp.save(tensors, storage_writer=writer, planner=LinearPlanner(), process_group=group)

torch and megatron-core compare all pairs of a tensor's pieces. The experts of Qwen3-30B-A3B are 12,288 pieces of one
tensor: every save would take minutes.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan


class LinearPlanner(MCoreSavePlanner):
    """megatron-core's planner with a check that takes linear time."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Skip torch's overlap check; the pieces must lie inside the tensor, at distinct places, and fill it."""
        # The hints must stay those of each rank, which otherwise searches all its pieces for each of them.
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans, rewrite_index_hints=False)
        for key, stored in self.metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                assert _fill(stored), f"the pieces of {key} do not fill it"
        return self.global_plan, self.metadata


def alone(sharded: ShardedTensor) -> ShardedTensor:
    """The piece with layer and expert as ordinary dimensions; otherwise megatron-core describes all pieces to torch."""
    size = stored_shape(sharded)
    return replace(
        sharded, data=sharded.data.view(size), local_shape=size, axis_fragmentations=None, prepend_axis_num=0
    )


def stored_shape(sharded: ShardedTensor) -> tuple[int, ...]:
    """Shape of a piece in torch.distributed.checkpoint, with leading layer and expert dimensions."""
    return (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)


def _fill(stored: TensorStorageMetadata) -> bool:
    inside = all(
        0 <= offset <= offset + size <= whole
        for chunk in stored.chunks
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, stored.size, strict=True)
    )
    distinct = len({chunk.offsets for chunk in stored.chunks}) == len(stored.chunks)
    return inside and distinct and sum(prod(chunk.sizes) for chunk in stored.chunks) == prod(stored.size)
