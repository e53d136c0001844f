"""Adapters gathered over ranks: PEFT's tensors, equal in every layout, with which the merged weights agree.

Not covered: engines (tests/e2e/test_adapter_push.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from oblr_megatron.checkpoint.hf import export_adapter
from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.checkpoint.peft_dir import TENSORS, check_adapter_dir
from oblr_megatron.families import MATRICES
from oblr_megatron.weights.adapter import PREFIX, A, AdapterShape, B
from oblr_megatron.weights.export import MegatronWeights
from oblr_megatron.weights.export_adapter import MegatronAdapter
from oblr_megatron.weights.manifest import manifest_of
from tests.distributed.adapters import LORA, SCALE, fill, values
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import load_policy
from tests.tiny import make_hf_dir, make_moe_hf_dir

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"tp": 2}, {"pp": 2}, {"tp": 2, "sp": True}],
    4: [{"tp": 2, "pp": 2}],
}
OF_MIXTURES: dict[int, list[dict[str, Any]]] = {
    2: [{"ep": 2}, {"tp": 2, "sp": True, "ep": 2, "etp": 1}],
    4: [{"pp": 2, "ep": 2}],
}
SHAPES = [AdapterShape(LORA["rank"], MATRICES), AdapterShape(LORA["rank"], ("k_proj", "down_proj"))]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gathered_adapters_are_whole_and_the_merged_weights_hold_them(world_size: int, tmp_path: Path) -> None:
    run_ranks(gather, world_size, make_hf_dir(tmp_path / "model", tied=True), LAYOUTS[world_size])


@pytest.mark.parametrize("world_size", OF_MIXTURES)
def test_experts_adapters_come_from_the_ranks_that_hold_the_experts(world_size: int, tmp_path: Path) -> None:
    run_ranks(gather, world_size, make_moe_hf_dir(tmp_path / "model"), OF_MIXTURES[world_size])


def gather(path: Path, layouts: list[dict[str, Any]]) -> None:
    for sizes in layouts:
        with layout(**sizes) as parallel:
            for shape in SHAPES:
                lora = LORA | {"targets": shape.targets}
                policy = load_policy(path, parallel, dtype="float64", lora=lora)
                fill(policy)
                source = MegatronAdapter(policy, shape)
                tensors = dict(source)
                assert [(spec.name, spec.shape) for spec in manifest_of(source)] == [
                    (name, tuple(tensor.shape)) for name, tensor in tensors.items()
                ]
                for name, tensor in tensors.items():
                    assert torch.equal(tensor, values(parameter_name(name), tuple(tensor.shape))), name
                check_merged(dict(MegatronWeights(policy, merged=False)), dict(MegatronWeights(policy)), tensors)
                target = path.parent / f"adapter-{dist.get_world_size()}-{sizes}-{len(shape.targets)}"
                export_adapter(policy, shape, LORA["alpha"], path, target)
                held = check_adapter_dir(target, check_hf_dir(path))
                assert (held.shape, held.scale) == (shape, SCALE)
                saved = load_file(target / TENSORS)
                assert saved.keys() == tensors.keys()
                assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())


def parameter_name(name: str) -> str:
    """The policy's name of a tensor in PEFT's names."""
    path, matrix = (name.removesuffix(A), "A") if name.endswith(A) else (name.removesuffix(B), "B")
    path = path.removeprefix(PREFIX + "model.").replace("self_attn", "self_attention.lora").replace("mlp", "mlp.lora")
    return f"decoder.{path}.{matrix}.weight"


def check_merged(base: dict[str, Tensor], merged: dict[str, Tensor], adapter: dict[str, Tensor]) -> None:
    for name, weight in base.items():
        module = PREFIX + name.removesuffix(".weight")
        expected = weight
        if module + A in adapter:
            expected = weight + SCALE * adapter[module + B] @ adapter[module + A]
        torch.testing.assert_close(merged[name], expected, rtol=1e-12, atol=1e-12)
