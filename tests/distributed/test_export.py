"""Hugging Face -> Megatron -> Hugging Face gives back every tensor bit for bit, in every layout, and reloads.

The extra memory of a push is counted. Not covered: failures of the file system.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

from oblr_megatron.checkpoint.hf import export_hf, load_hf_weights
from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.config import ModelConfig
from oblr_megatron.errors import UserError
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import Policy, build_policy
from oblr_megatron.weights.export import MegatronWeights
from oblr_megatron.weights.manifest import manifest_of
from oblr_megatron.weights.shm import HALVES, SharedBuffer, bucket_capacity, fill_buckets
from tests.distributed.launch import layout, run_ranks
from tests.live import ExactBytes
from tests.tiny import make_hf_dir

LAYOUTS = {
    1: [{}],
    2: [{"tp": 2}, {"pp": 2}, {"tp": 2, "sp": True}],
    4: [{"tp": 4}, {"tp": 2, "pp": 2}],
}


def load(path: Path, parallel: Parallel, dtype: str = "float32") -> Policy:
    policy = build_policy(
        AutoConfig.from_pretrained(path), ModelConfig.model_validate({"path": path, "dtype": dtype}), parallel
    )
    load_hf_weights(policy, path)
    return policy


def read(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def round_trips(sources: list[tuple[Path, str]], target: Path) -> None:
    for sizes in LAYOUTS[dist.get_world_size()]:
        with layout(**sizes) as parallel:
            for source, dtype in sources:
                policy = load(source, parallel, dtype)
                assert all(parameter.isfinite().all() for _, parameter in policy.named_parameters()), source
                label = "-".join([source.name, dtype, *(f"{key}{size}" for key, size in sizes.items())])
                export_hf(policy, check_hf_dir(source), target / label, max_shard_bytes=30_000)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    """(directory, dtype the policy is held in): an fp32 policy of a bf16 checkpoint must write bf16 again."""
    root = tmp_path_factory.mktemp("sources")
    untied, tied = make_hf_dir(root / "untied"), make_hf_dir(root / "tied", tied=True, max_shard_size="20KB")
    half = make_hf_dir(root / "half", dtype=torch.bfloat16, max_shard_size="20KB", num_key_value_heads=1)
    qwen2 = make_hf_dir(root / "qwen2", family="qwen2")
    llama = make_hf_dir(root / "llama", family="llama", dtype=torch.bfloat16)
    known = [(untied, "float32"), (tied, "float32"), (half, "bfloat16"), (half, "float32")]
    return [*known, (qwen2, "float32"), (llama, "bfloat16")]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_round_trip_is_bit_equal(world_size: int, sources: list[tuple[Path, str]], tmp_path: Path) -> None:
    run_ranks(round_trips, world_size, sources, tmp_path)
    exports = sorted(tmp_path.iterdir())
    assert len(exports) == len(LAYOUTS[world_size]) * len(sources)  # and no half-written directory
    for export in exports:
        source = next(path for path, _ in sources if path.name == export.name.split("-")[0])
        assert_same(read(export), read(source))
        assert json.loads((export / "config.json").read_text()) == json.loads((source / "config.json").read_text())
        assert (export / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
        assert (export / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def export_one(source: Path, target: Path, max_shard_bytes: int) -> None:
    with layout() as parallel:
        export_hf(load(source, parallel), check_hf_dir(source), target, max_shard_bytes=max_shard_bytes)


def test_transformers_reloads_shards(tmp_path: Path) -> None:
    source = make_hf_dir(tmp_path / "source", tied=True)
    run_ranks(export_one, 1, source, tmp_path / "target", 20_000)
    files = list((tmp_path / "target").glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 20_000 + 2_000 for file in files)  # limit and header
    model, info = Qwen3ForCausalLM.from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = Qwen3ForCausalLM.from_pretrained(source).state_dict()
    assert_same(dict(model.state_dict()), dict(expected))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "target")) == model.config.vocab_size


def test_a_stored_tied_output_layer_is_written_again(tmp_path: Path) -> None:
    source = make_hf_dir(tmp_path / "source", tied=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    from safetensors.torch import save_file

    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    run_ranks(export_one, 1, source, tmp_path / "target", 5_000_000)
    assert_same(read(tmp_path / "target"), tensors)
    with safe_open(tmp_path / "target" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def export_onto_existing(source: Path, target: Path) -> str:
    with layout() as parallel:
        policy = load(source, parallel)
        try:
            export_hf(policy, check_hf_dir(source), target)
        except UserError as error:
            return str(error)
    return ""


def test_an_existing_target_is_refused_on_every_rank(tmp_path: Path) -> None:
    """Unless it is an empty directory, for example on a larger disk that a link names."""
    source = make_hf_dir(tmp_path / "source")
    (tmp_path / "target" / "mine").mkdir(parents=True)
    messages = run_ranks(export_onto_existing, 2, source, tmp_path / "target")
    assert all("target exists" in message for message in messages)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert run_ranks(export_onto_existing, 2, source, tmp_path / "link") == ["", ""]
    assert_same(read(tmp_path / "empty"), read(source))


def names_of_stream(source: Path) -> list[str]:
    with layout(tp=2) as parallel:
        return [name for name, _ in MegatronWeights(load(source, parallel))]


def test_tensors_of_a_parameter_are_neighbours(tmp_path: Path) -> None:
    source = make_hf_dir(tmp_path / "source")
    for names in run_ranks(names_of_stream, 2, source):
        assert sorted(names) == sorted(read(source))
        for left, right in (("q_proj", "k_proj"), ("k_proj", "v_proj"), ("gate_proj", "up_proj")):
            index = next(i for i, name in enumerate(names) if left in name)
            assert right in names[index + 1]


def peaks_of_a_push(source: Path) -> list[tuple[str, int, int]]:
    """(layout, bytes made while all buckets are filled, bytes of the largest piece)"""
    found = []
    for sizes in LAYOUTS[dist.get_world_size()]:
        with layout(**sizes) as parallel:
            policy = load(source, parallel)
            for piece_bytes in (1, 2**29):
                weights = MegatronWeights(policy, torch.bfloat16, piece_bytes=piece_bytes)
                capacity = bucket_capacity(manifest_of(weights), 2048)
                buffer = SharedBuffer.create()
                buffer.reserve(HALVES * capacity)
                live = ExactBytes()
                held = [buffer.bytes, *(parameter.detach() for _, parameter in policy.named_parameters())]
                live._seen |= {tensor.untyped_storage()._cdata for tensor in held}
                with live:
                    buckets = sum(1 for _ in fill_buckets(weights, capacity, buffer))
                assert buckets > 20 and buffer.bytes.numel() == HALVES * capacity
                found.append((f"{sizes}, {piece_bytes}", live.peak, 2 * max(piece.numel for piece in weights._pieces)))
                buffer.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_push_holds_two_buckets_and_at_most_one_piece(world_size: int, tmp_path: Path) -> None:
    """fp32 weights travel as bf16. One rank allocates nothing: tensors go straight into the buckets.

    Four tensor-parallel ranks share two KV groups, so q, k and v are copied out of the piece.
    """
    source = make_hf_dir(tmp_path / "source", tied=True)
    joint = 2 * 48 * (4 + 2 * 2) * 16
    for rank in run_ranks(peaks_of_a_push, world_size, source):
        for name, peak, piece in rank:
            assert peak == (0 if world_size == 1 else piece + (joint if "'tp': 4" in name else 0)), name
