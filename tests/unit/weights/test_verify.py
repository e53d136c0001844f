"""The part of a tensor that each worker of a tensor-parallel engine holds, and the name of a difference.

Not covered: vLLM's own parameters (tests/e2e/test_push.py), workers on several GPUs.
"""

from typing import Any

import pytest
import torch

from oblr_megatron.weights import verify
from oblr_megatron.weights.names import ModelShape, table
from oblr_megatron.weights.verify import digest, expected_digests, first_difference, worker_part

SHAPE = ModelShape(hidden=4, layers=1, heads=8, groups=2, head_dim=2, ffn=8, vocab=100, tied=False)
ITEMS = {name: (item, part) for item in table(SHAPE) for part, name in enumerate(item.hf)}
ATTENTION = "model.layers.0.self_attn."


def numbered(name: str) -> torch.Tensor:
    item, part = ITEMS[name]
    size = item.shapes[part]
    return torch.arange(torch.Size(size).numel(), dtype=torch.float32).view(size)


@pytest.mark.parametrize(
    ("name", "workers", "expected"),
    [
        (ATTENTION + "q_proj.weight", 4, [slice(4), slice(4, 8), slice(8, 12), slice(12, 16)]),
        (ATTENTION + "k_proj.weight", 2, [slice(2), slice(2, 4)]),
        (ATTENTION + "v_proj.weight", 4, [slice(2), slice(2), slice(2, 4), slice(2, 4)]),  # two workers a KV group
        (ATTENTION + "o_proj.weight", 2, [(slice(4), slice(8)), (slice(4), slice(8, 16))]),
        ("model.layers.0.mlp.up_proj.weight", 2, [slice(4), slice(4, 8)]),
        ("model.layers.0.mlp.down_proj.weight", 2, [(slice(4), slice(4)), (slice(4), slice(4, 8))]),
        ("model.embed_tokens.weight", 2, [slice(64), slice(64, 100)]),  # 100 rows, padded to 128
        ("lm_head.weight", 4, [slice(32), slice(32, 64), slice(64, 96), slice(96, 100)]),
        ("model.norm.weight", 2, [slice(4), slice(4)]),
    ],
)
def test_the_part_of_each_worker(name: str, workers: int, expected: list[Any]) -> None:
    """Rows, and columns of row-parallel layers."""
    item, part = ITEMS[name]
    tensor = numbered(name)
    for worker, place in enumerate(expected):
        assert torch.equal(worker_part(item, part, tensor, SHAPE, worker, workers), tensor[place])


def test_a_digest_depends_on_the_bytes_in_order() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    assert digest(tensor) == digest(tensor.t().contiguous().t()) == digest(tensor.flatten())
    assert digest(tensor) != digest(tensor.t())
    assert digest(tensor) != digest(tensor.float())
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0])), "equal values may have different bits"


def test_the_first_difference_in_the_order_of_the_push_is_named() -> None:
    def found(changed: dict[str, float], workers: int = 1) -> str | None:
        stream = {name: numbered(name) for name in ITEMS}
        expected = expected_digests(stream.items(), SHAPE, {workers})[workers]
        held = {name: tensor + changed.get(name, 0.0) for name, tensor in stream.items()}
        return first_difference(expected, expected_digests(held.items(), SHAPE, {workers})[workers])

    assert found({}) is None and found({}, workers=2) is None
    assert found({"model.norm.weight": 1.0, ATTENTION + "k_proj.weight": 1.0}) == ATTENTION + "k_proj.weight"
    assert found({"lm_head.weight": 1.0}, workers=2) == "lm_head.weight of worker 0"
    assert first_difference([{"a": "1"}], [{}]) == "a"
    assert first_difference([{"a": "1"}], [{"a": "1", "b": "2"}]) == "b"


def test_engines_of_any_size_need_one_pass_and_one_table_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(verify, "table", lambda shape: built.append(shape) or table(shape))
    stream = {name: numbered(name) for name in ITEMS}
    together = expected_digests(iter(stream.items()), SHAPE, {1, 2, 4})
    assert built == [SHAPE]
    assert together == {size: expected_digests(stream.items(), SHAPE, {size})[size] for size in (1, 2, 4)}
