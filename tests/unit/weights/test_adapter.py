"""Names and shapes of adapters, their cuts over the workers of an engine, and the size of a push.

Not covered: vLLM's slots (tests/e2e/test_adapter_push.py).
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from oblr_megatron.families import MATRICES
from oblr_megatron.model.published import published
from oblr_megatron.weights.adapter import PREFIX, A, AdapterShape, AdapterWeights, B, adapter_shapes, adapter_table
from oblr_megatron.weights.names import ModelShape, table
from oblr_megatron.weights.verify import worker_part

SHAPE = ModelShape(hidden=4, layers=2, heads=8, groups=2, head_dim=2, ffn=8, vocab=100, tied=False)
LAYER = PREFIX + "model.layers.0."


def test_every_target_has_a_pair_next_to_its_matrix() -> None:
    shapes = adapter_shapes(SHAPE, AdapterShape(3, MATRICES))
    assert len(shapes) == 2 * 2 * len(MATRICES)
    weights = {name: size for item in table(SHAPE) for name, size in zip(item.hf, item.shapes, strict=True)}
    for name, (rank, columns) in ((name, size) for name, size in shapes.items() if name.endswith(A)):
        rows, other = shapes[name.removesuffix(A) + B]
        assert rank == other == 3
        assert weights[name.removeprefix(PREFIX).removesuffix(A) + ".weight"] == (rows, columns)
    only = adapter_shapes(SHAPE, AdapterShape(3, ("v_proj",)))
    assert {name.split(".")[-3] for name in only} == {"v_proj"}


@pytest.mark.parametrize(
    ("name", "workers", "expected"),
    [
        ("self_attn.q_proj" + A, 2, [(slice(3), slice(4))] * 2),
        ("self_attn.q_proj" + B, 2, [(slice(8), slice(3)), (slice(8, 16), slice(3))]),
        ("self_attn.v_proj" + B, 4, [(slice(2), slice(3))] * 2 + [(slice(2, 4), slice(3))] * 2),
        ("self_attn.o_proj" + A, 2, [(slice(3), slice(8)), (slice(3), slice(8, 16))]),
        ("self_attn.o_proj" + B, 2, [(slice(4), slice(3))] * 2),
        ("mlp.up_proj" + B, 2, [(slice(4), slice(3)), (slice(4, 8), slice(3))]),
        ("mlp.down_proj" + A, 2, [(slice(3), slice(4)), (slice(3), slice(4, 8))]),
    ],
)
def test_the_part_of_each_worker(name: str, workers: int, expected: list[Any]) -> None:
    (one,) = (one for one in adapter_table(SHAPE, AdapterShape(3, MATRICES)) if one.name == LAYER + name)
    tensor = torch.arange(prod(one.shape)).view(one.shape)
    for worker, place in enumerate(expected):
        assert torch.equal(worker_part(one.item, one.part, tensor, SHAPE, worker, workers), tensor[place])


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"])
def test_a_push_of_rank_16_has_at_most_2_percent_of_the_weights(model: str) -> None:
    shape = ModelShape.of(published(model))
    whole = sum(prod(size) for item in table(shape) for size in item.shapes)
    assert 0 < sum(map(prod, adapter_shapes(shape, AdapterShape(16, MATRICES)).values())) <= 0.02 * whole


@pytest.mark.parametrize("text", ["16:q_proj,v_proj", "1:down_proj"])
def test_a_shape_is_read_from_its_text(text: str) -> None:
    assert str(AdapterShape.of(text)) == text


def test_targets_have_one_order() -> None:
    assert str(AdapterShape.of("16:v_proj,q_proj")) == "16:q_proj,v_proj"


@pytest.mark.parametrize("text", ["", "16", "16:", "0:q_proj", "x:q_proj", "-1:q_proj", "4:lm_head"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="RANK:TARGETS"):
        AdapterShape.of(text)


def test_b_travels_times_the_scale() -> None:
    class Source(dict[str, torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(self.items())

    tensors = Source({"x" + A: torch.ones(2), "x" + B: torch.ones(2)})
    pushed: Any = AdapterWeights(tensors, tensors, 2.5)  # type: ignore[arg-type]
    assert {name: tensor.tolist() for name, tensor in pushed} == {"x" + A: [1, 1], "x" + B: [2.5, 2.5]}
