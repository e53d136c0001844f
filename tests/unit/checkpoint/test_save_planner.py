"""The plan of a save compares no pairs of pieces, and a tensor that its pieces do not fill is refused.

Not covered: what the saves hold (tests/distributed/test_resume.py, test_convert.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from oblr_megatron.checkpoint.save_planner import LinearPlanner

KEY, SIZE = "decoder.layers.mlp.experts.linear_fc1.weight", (48, 128, 2 * 768, 2048)  # of Qwen3-30B-A3B


def item(layer: int, expert: int, row: int) -> WriteItem:
    offsets = torch.Size((layer, expert, row, 0))
    chunk = ChunkStorageMetadata(offsets, torch.Size((1, 1, 768, 2048)))
    data = TensorWriteData(chunk, TensorProperties(torch.bfloat16), torch.Size(SIZE))
    return WriteItem(MetadataIndex(KEY, offsets, 3), WriteItemType.SHARD, tensor_data=data)


@pytest.fixture(scope="module")
def items() -> list[WriteItem]:
    return [item(*place) for place in product(range(SIZE[0]), range(SIZE[1]), (0, 768))]


def plan(items: list[WriteItem]) -> Any:
    """The global plan of 8 ranks."""
    return LinearPlanner().create_global_plan([SavePlan(items[rank::8]) for rank in range(8)])


def test_no_pair_of_pieces_is_compared(items: list[WriteItem], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise AssertionError("a pair was compared")

    monkeypatch.setattr(default_planner, "_check_box_overlap", refuse)
    plans, metadata = plan(items)
    stored = metadata.state_dict_metadata[KEY]
    assert isinstance(stored, TensorStorageMetadata) and tuple(stored.size) == SIZE
    assert sum(prod(chunk.sizes) for chunk in stored.chunks) == prod(SIZE)
    assert [len(own.items) for own in plans] == [len(items) // 8] * 8
    assert {own.index.index for one in plans for own in one.items} == {3}, "each rank's own hint"


@pytest.mark.parametrize(
    "change",
    [
        lambda items: items[:-1],
        lambda items: [*items, items[0]],
        lambda items: [*items[:-1], items[0]],
        lambda items: [*items[:-1], item(47, 127, 769)],
    ],
    ids=["missing", "twice", "another", "outside"],
)
def test_pieces_that_do_not_fill_their_tensor_are_refused(
    items: list[WriteItem], change: Callable[[list[WriteItem]], list[WriteItem]]
) -> None:
    with pytest.raises(AssertionError, match=f"pieces of {KEY} do not fill it"):
        plan(change(items))
