"""Loading weights: missing, unknown and misshapen tensors are refused; files are read in slices.

Not covered: truncated files (test_hf_dir.py), round trips (tests/distributed/test_export.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from oblr_megatron.checkpoint.hf import load_hf_weights, open_hf_tensors
from oblr_megatron.checkpoint.hf_dir import BUFFERS, INDEX, check_hf_dir
from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.errors import UserError
from oblr_megatron.model import cpu
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.policy import build_policy
from oblr_megatron.padding import padded_vocab_size
from tests.tiny import make_hf_dir


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    yield initialize(ParallelConfig())
    shutdown()
    cpu.uninstall()


def load(path: Path, parallel: Parallel) -> None:
    policy = build_policy(Qwen3Config.from_pretrained(path), ModelConfig(path=path), parallel)
    load_hf_weights(policy, path)


def rewrite(path: Path, changes: dict[str, Tensor | None]) -> None:
    """Add tensors to a single-file checkpoint, replace them, or remove them (None)."""
    tensors = load_file(path / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")


NORM = "model.layers.1.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, rf"1 tensors are missing.*'{NORM}'"),
        ({NORM: None, "model.norm.weight": None}, "2 tensors are missing"),
        ({"model.layers.0.mlp.experts.0.weight": torch.zeros(1)}, r"1 tensors .*'model.*experts\.0\.weight'"),
        ({NORM: torch.zeros(8)}, rf"'{NORM}' has shape \[8\], .* \[16\]"),
        ({"lm_head.weight": None}, r"1 tensors are missing.*'lm_head\.weight'"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path, parallel: Parallel
) -> None:
    path = make_hf_dir(tmp_path)
    rewrite(path, changes)
    with pytest.raises(UserError, match=message) as caught:
        load(path, parallel)
    assert caught.value.where == str(path)


def test_an_unsupported_model_is_refused(tmp_path: Path, parallel: Parallel) -> None:
    config = Qwen3Config.from_pretrained(make_hf_dir(tmp_path))
    config.attention_bias = True
    with pytest.raises(UserError, match="attention_bias"):
        build_policy(config, ModelConfig(path=tmp_path), parallel)


def test_weights_are_nan_until_loaded_and_torchs_random_state_is_unchanged(tmp_path: Path, parallel: Parallel) -> None:
    path = make_hf_dir(tmp_path)
    before = torch.get_rng_state()
    policy = build_policy(Qwen3Config.from_pretrained(path), ModelConfig(path=path), parallel)
    assert all(parameter.isnan().all() for _, parameter in policy.named_parameters())
    load_hf_weights(policy, path)
    assert all(parameter.isfinite().all() for _, parameter in policy.named_parameters())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_buffers_of_rotary_embeddings_are_skipped(max_shard_size: str, tmp_path: Path, parallel: Parallel) -> None:
    path = make_hf_dir(tmp_path, max_shard_size=max_shard_size)
    file, index = sorted(path.glob("*.safetensors"))[0], path / INDEX
    added = {f"model.layers.1.self_attn.{name}": torch.ones(8) for name in BUFFERS}
    save_file(load_file(file) | added, file, metadata={"format": "pt"})
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(added, file.name)
        index.write_text(json.dumps(content))
    check_hf_dir(path)
    load(path, parallel)


def test_several_files_are_found_by_the_index(tmp_path: Path) -> None:
    path = make_hf_dir(tmp_path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    with open_hf_tensors(path) as tensors:
        assert len(tensors) == 25
        assert tensors["model.embed_tokens.weight"][3:5].shape == (2, 48)
        assert tensors["model.embed_tokens.weight"].get_dtype() == "F32"


@pytest.mark.parametrize(
    ("vocab", "divisor", "tp", "padded"), [(151936, 128, 1, 151936), (151936, 128, 8, 152576), (37, 1, 2, 38)]
)
def test_the_vocabulary_is_padded_to_a_multiple(vocab: int, divisor: int, tp: int, padded: int) -> None:
    assert padded_vocab_size(vocab, divisor, tp) == padded
