"""Hugging Face -> torch_dist -> policies of every layout -> their own torch_dist -> Hugging Face: bit for bit equal.

Each layout saves what a run saves: weights, fp32 masters, moments and random states, written by all ranks. Not covered:
Transformer Engine's layers, several machines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from oblr_megatron.checkpoint.convert import to_hf, to_megatron
from oblr_megatron.checkpoint.distributed import TorchDistWriter, load_weights, training_state
from oblr_megatron.config import ModelConfig, OptimizerConfig
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.policy import build_policy
from tests.distributed.launch import layout, run_ranks
from tests.distributed.test_export import assert_same, read
from tests.tiny import make_hf_dir, make_moe_hf_dir

DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2vp2": (2, {"pp": 2, "vp": 2}),
    "tp2pp2": (4, {"tp": 2, "pp": 2}),
}
MIXTURE: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "ep2": (2, {"ep": 2}),
    "tp2pp2": (4, {"tp": 2, "pp": 2, "sp": True, "etp": 1, "ep": 2}),
}
LAYERS = 4  # so that two stages have two chunks each


def load_and_save(cases: list[tuple[Path, Path, str, Path, dict[str, Any]]]) -> None:
    """Each case: checkpoint, Hugging Face directory, dtype, target, layout."""
    for checkpoint, hf_dir, dtype, target, sizes in cases:
        with layout(**sizes) as parallel:
            config = ModelConfig.model_validate({"path": hf_dir, "dtype": dtype})
            policy = build_policy(AutoConfig.from_pretrained(hf_dir), config, parallel)
            load_weights(policy, checkpoint)
            assert all(parameter.isfinite().all() for _, parameter in policy.named_parameters())
            optimizer = PolicyOptimizer(policy, OptimizerConfig())
            if parallel.rank == 0:
                target.mkdir()
            dist.barrier()
            state = training_state(policy, optimizer)
            TorchDistWriter(dist.new_group(backend="gloo"), parallel).stage(state, target)()


def assert_same_model(found: Path, source: Path) -> None:
    assert_same(read(found), read(source))
    assert json.loads((found / "config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS}
    return {
        "untied": make_hf_dir(root / "untied", **sizes),
        "tied": make_hf_dir(root / "tied", tied=True, dtype=torch.bfloat16, max_shard_size="20KB", **sizes),
        "qwen2": make_hf_dir(root / "qwen2", family="qwen2", **sizes),
        "llama": make_hf_dir(root / "llama", family="llama", tied=True, **sizes),
        "mixture": make_moe_hf_dir(root / "mixture", **sizes),
        "half_mixture": make_moe_hf_dir(root / "half_mixture", dtype=torch.bfloat16, **sizes),
    }


@pytest.fixture(scope="module")
def checkpoints(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each source converted; tests only read them."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, source in sources.items():
        to_megatron(source, root / name)
    return {name: root / name for name in sources}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_round_trip_through_every_layout_is_bit_equal(
    world_size: int, sources: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    cases = []
    for name, source in sources.items():
        dtype = json.loads((source / "config.json").read_text())["dtype"]
        for label, (ranks, sizes) in (MIXTURE if "mixture" in name else DENSE).items():
            if ranks == world_size:
                cases.append((checkpoints[name], source, dtype, tmp_path / f"{name}-{label}", sizes))
    run_ranks(load_and_save, world_size, cases)
    for _, source, _, saved, sizes in cases:
        target = saved.with_name(f"{saved.name}-hf")
        to_hf(saved, target, hf_source=source, max_shard_bytes=40_000)
        assert_same_model(target, source)
        ranks_that_wrote = {file.name.split("_")[2] for file in saved.glob("__*.distcp")}
        assert len(ranks_that_wrote) == world_size, sizes  # the layout did cut it
