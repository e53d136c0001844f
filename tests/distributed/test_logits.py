"""Logits of the Megatron policy equal those of transformers with the same weights, in every family and kind of layout.

Not covered: gradients (test_gradients.py, also on 4 ranks), Transformer Engine's layers, CUDA.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import ModelConfig
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import build_policy
from oblr_megatron.model.step import run_schedule
from oblr_megatron.types import MicroBatch
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import whole_logits
from tests.oracle import exact_norms, load_oracle
from tests.tiny import DENSE, VOCAB, make_hf_dir

LAYOUTS = {
    1: ["tp1"],
    2: ["tp1", "tp2", "tp2sp", "pp2"],
}


def make_batch(seed: int, rows: int, length: int) -> MicroBatch:
    """Random tokens, the same on every rank."""
    ids = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = torch.cat([ids[:, 1:], ids.new_zeros(rows, 1)], dim=1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return MicroBatch(ids, labels, mask, torch.zeros(rows, length), torch.arange(rows))


BATCHES = [(1, 2, 11), (2, 3, 7), (3, 1, 16)]  # lengths that neither agree nor divide by the ranks


def logits_of_batches(parallel: Parallel, path: Path, dtype: str = "float32") -> list[torch.Tensor] | None:
    """Logits of every batch over the real vocabulary, on the last stage; None on the others."""
    config = ModelConfig.model_validate({"path": path, "dtype": dtype})
    policy = build_policy(AutoConfig.from_pretrained(path), config, parallel)
    load_hf_weights(policy, path)

    def gather(hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return hidden.sum(), {"logits": whole_logits(policy, hidden)}

    outputs = run_schedule(policy, [make_batch(*batch) for batch in BATCHES], gather, forward_only=True)
    return [output["logits"] for output in outputs] if parallel.is_last_stage else None


def all_layouts(paths: list[Path], dtype: str = "float32") -> dict[str, list[list[torch.Tensor] | None]]:
    results: dict[str, list[list[torch.Tensor] | None]] = {}
    for name in LAYOUTS[dist.get_world_size()]:
        sizes = {kind: int(name.split(kind)[1][0]) for kind in ("tp", "pp") if kind in name}
        with layout(**sizes, sp="sp" in name) as parallel:
            results[name] = [logits_of_batches(parallel, path, dtype) for path in paths]
    return results


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [
        make_hf_dir(root / "untied"),
        make_hf_dir(root / "tied", tied=True, seed=1),
        make_hf_dir(root / "one_group", num_key_value_heads=1, seed=2),
        make_hf_dir(root / "qwen2", family="qwen2", seed=3),
        make_hf_dir(root / "llama", family="llama", seed=4),
    ]


@pytest.fixture(scope="module")
def exact_paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model of every dense family, in fp64."""
    root = tmp_path_factory.mktemp("exact")
    return [make_hf_dir(root / family, family=family, tied=True, dtype=torch.float64) for family in DENSE]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_logits_equal_transformers(world_size: int, paths: list[Path]) -> None:
    results = run_ranks(all_layouts, world_size, paths)
    for index, path in enumerate(paths):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for batch_index, batch in enumerate(BATCHES):
            ids = make_batch(*batch).input_ids
            with torch.no_grad():
                expected = model(ids).logits
            for name in LAYOUTS[world_size]:
                last_stage = [rank[name][index] for rank in results if rank[name][index] is not None]
                assert last_stage, name
                for logits in last_stage:
                    difference = (logits[batch_index][:, : ids.shape[1]] - expected).abs().max()
                    assert difference <= 1e-4, (name, path.name, batch, difference)


def test_logits_of_every_family_equal_transformers_in_fp64(exact_paths: list[Path]) -> None:
    results = run_ranks(all_layouts, 2, exact_paths, "float64")
    for index, path in enumerate(exact_paths):
        model = load_oracle(path)
        for batch_index, batch in enumerate(BATCHES):
            ids = make_batch(*batch).input_ids
            with torch.no_grad(), exact_norms():
                expected = model(ids).logits
            for name in LAYOUTS[2]:
                for logits in [rank[name][index] for rank in results if rank[name][index] is not None]:
                    difference = (logits[batch_index][:, : ids.shape[1]] - expected).abs().max()
                    assert difference <= 1e-10, (name, path.name, batch, difference)
