"""Conversions by one process: the written files, and refused inputs.

Not covered: --check (test_convert_check.py), checkpoints of other layouts (tests/distributed/test_convert.py), memory
(test_convert_memory.py), the published sizes (test_real_sizes.py).
"""

from __future__ import annotations

import errno
import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from oblr_megatron.checkpoint import safetensors_io, store
from oblr_megatron.checkpoint.convert import to_hf, to_megatron
from oblr_megatron.checkpoint.distributed import TorchDistWriter, model_state
from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.checkpoint.hf_write import write_description
from oblr_megatron.checkpoint.piece_reader import PieceReader
from oblr_megatron.checkpoint.pieces import NAMINGS, single_process
from oblr_megatron.cli import main
from oblr_megatron.config import ModelConfig
from oblr_megatron.model.policy import build_policy
from tests.e2e.forked import call_forked
from tests.tiny import VOCAB, make_hf_dir, make_moe_hf_dir

ROOT = Path(__file__).resolve().parents[3]
MAKE: dict[str, Callable[..., Path]] = {
    "untied": make_hf_dir,
    "tied": lambda path, **options: make_hf_dir(path, tied=True, **options),
    "mixture": make_moe_hf_dir,
}


def read(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(found: Path, source: Path, dtype: torch.dtype | None = None) -> None:
    expected, actual = read(source), read(found)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == (dtype or tensor.dtype)
        assert torch.equal(actual[name], tensor.to(dtype or tensor.dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MAKE)
def test_there_and_back_is_bit_equal(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = MAKE[kind](tmp_path / "source", dtype=dtype, max_shard_size="30KB")
    there = to_megatron(source, tmp_path / "checkpoint")
    back = to_hf(tmp_path / "checkpoint", tmp_path / "hf", max_shard_bytes=30_000)
    assert_same(tmp_path / "hf", source)
    size = sum(tensor.nbytes for tensor in read(source).values())
    assert (there.num_bytes, back.num_bytes, there.dtype, back.dtype) == (size, size, dtype, dtype)
    files = list((tmp_path / "hf").glob("model-*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 35_000 for file in files)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "hf" / name).read_text()) == json.loads((source / name).read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf", "source"]  # nothing half-written


def test_a_given_dtype_is_what_is_written_and_declared(root: Path, tmp_path: Path) -> None:
    assert to_megatron(root / "hf", tmp_path / "half", torch.bfloat16).num_bytes == 2 * sum(
        tensor.numel() for tensor in read(root / "hf").values()
    )
    to_hf(tmp_path / "half", tmp_path / "kept")
    to_hf(root / "checkpoint", tmp_path / "cast", torch.bfloat16)
    for name in ("kept", "cast"):
        assert_same(tmp_path / name, root / "hf", torch.bfloat16)
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert model.dtype == torch.bfloat16 and not info["missing_keys"] and not info["unexpected_keys"]
        assert len(AutoTokenizer.from_pretrained(tmp_path / name)) == VOCAB


def test_types_that_differ_are_widened_and_files_stay_aligned(tmp_path: Path) -> None:
    """A q norm of 16 bf16 values, then fp32 ones: transformers and safetensors read the written file."""
    source = make_hf_dir(tmp_path / "source", dtype=torch.bfloat16)
    tensors = read(source)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-6
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert to_megatron(source, tmp_path / "checkpoint").dtype == torch.float32
    to_hf(tmp_path / "checkpoint", tmp_path / "hf")
    assert_same(tmp_path / "hf", source, torch.float32)


def test_padding_rows_are_zero_and_every_file_is_in_the_manifest(root: Path) -> None:
    manifest = store.read_manifest(root / "checkpoint")
    assert manifest.step == 0 and manifest.state == {}
    on_disk = {file.relative_to(root / "checkpoint").as_posix() for file in (root / "checkpoint").rglob("*")}
    assert set(manifest.files) == on_disk - {"checkpoint.json", "hf"}
    assert {"common.pt", ".metadata", "metadata.json", "hf/config.json", "hf/tokenizer.json"} <= set(manifest.files)
    store.check_contents(root / "checkpoint", manifest, manifest.files)
    config = AutoConfig.from_pretrained(root / "hf")
    with single_process() as parallel:
        policy = build_policy(config, ModelConfig(path=root / "hf"), parallel)
        load_hf_weights(policy, root / "hf")
        reader = PieceReader(root / "checkpoint")
        stored = reader.whole.state_dict_metadata
        state = policy.modules[0].sharded_state_dict()
        assert {value.key for value in state.values() if hasattr(value, "key")} == {
            key.split("/shard_")[0] for key in stored
        }
        loaded = load_with_megatron(policy.modules[0].sharded_state_dict(), root / "checkpoint")
    for name, parameter in policy.modules[0].named_parameters():
        assert torch.equal(loaded[name], parameter), name
    embedding = loaded["embedding.word_embeddings.weight"]
    assert len(embedding) == 128 and not embedding[VOCAB:].any()


def load_with_megatron(state: dict, path: Path) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing

    for value in state.values():  # so that what is found was read
        if getattr(value, "data", None) is not None and hasattr(value, "dtype"):
            value.data = torch.full_like(value.data, torch.nan)
    return dist_checkpointing.load(state, str(path))


@pytest.mark.parametrize(("naming", "kind"), [(0, "tied"), *((naming, "mixture") for naming in range(len(NAMINGS)))])
def test_megatron_lms_own_checkpoints_with_a_config_from_elsewhere(naming: int, kind: str, tmp_path: Path) -> None:
    """With each of its namings; without a manifest, and with a larger padded vocabulary."""
    source = MAKE[kind](tmp_path / "source")
    (tmp_path / "iter_0000010").mkdir()
    with single_process() as parallel:
        config = ModelConfig.model_validate({"path": source, "make_vocab_size_divisible_by": 512})
        policy = build_policy(AutoConfig.from_pretrained(source), config, parallel)
        load_hf_weights(policy, source)
        state = {"model": policy.modules[0].sharded_state_dict(metadata=dict(NAMINGS[naming]))}
        TorchDistWriter(dist.new_group(backend="gloo"), parallel).stage(state, tmp_path / "iter_0000010")()
    to_hf(tmp_path / "iter_0000010", tmp_path / "hf", hf_source=source)
    assert_same(tmp_path / "hf", source)


def test_the_norm_before_experts_has_the_key_that_megatron_lm_gives_it(tmp_path: Path) -> None:
    """That of Transformer Engine's spec (megatron-core's gpt_layer_specs.py)."""
    source = make_moe_hf_dir(tmp_path / "source")
    with single_process() as parallel:
        policy = build_policy(
            AutoConfig.from_pretrained(source), ModelConfig.model_validate({"path": source}), parallel
        )
        keys = [value.key for value in nested_values(model_state(policy))]
    assert keys.count("decoder.layers.pre_mlp_layernorm.weight") == policy.hf_config.num_hidden_layers


def test_a_run_means_its_newest_checkpoint(root: Path, tmp_path: Path) -> None:
    make_hf_dir(tmp_path / "newer", seed=1)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    shutil.copytree(root / "checkpoint", tmp_path / "run" / "checkpoints" / store.step_name(9))
    to_megatron(tmp_path / "newer", tmp_path / "run" / "checkpoints" / store.step_name(10))
    for number, source in enumerate([tmp_path / "run", tmp_path / "run" / "checkpoints"]):
        to_hf(source, tmp_path / f"hf{number}")
        assert_same(tmp_path / f"hf{number}", tmp_path / "newer")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGED: dict[str, tuple[Callable[[Path], object], str, bool, str]] = {
    # what is done to which file of a copy of the checkpoint, whether it is Megatron-LM's, what the message says
    "weights cut off": (cut, "__1_0.distcp", False, "is cut off: "),
    "a bit of the weights": (flip, "__1_0.distcp", False, "is damaged: its checksum"),
    "a bit of the metadata": (flip, ".metadata", False, "damaged"),
    "a bit of the config": (flip, "hf/config.json", False, "damaged"),
    "a bit of the manifest": (flip, "checkpoint.json", False, "damaged"),
    "a file is missing": (Path.unlink, "__2_0.distcp", False, "the file is missing"),
    "Megatron-LM's, cut off": (cut, "__3_0.distcp", True, "bytes, .metadata implies"),
    "Megatron-LM's, metadata cut off": (cut, ".metadata", True, "the file is damaged: "),
}
TO_HF: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    # what is done to a copy of the checkpoint, further options, what the message names
    "no directory": (shutil.rmtree, [], "does not exist [{copy}]"),
    "a Hugging Face directory": (
        lambda copy: (shutil.rmtree(copy), make_hf_dir(copy)),
        [],
        "it is a Hugging Face directory [{copy}]",
    ),
    "a run without checkpoints": (
        lambda copy: (shutil.rmtree(copy), (copy / "checkpoints").mkdir(parents=True)),
        [],
        "the run has no checkpoint [{copy}]",
    ),
    "Megatron-LM's without a config": (
        lambda copy: (copy / "checkpoint.json").unlink(),
        [],
        "nor a config [{copy}]. Fix: give the directory with its config.json and tokenizer as --hf-source",
    ),
    "no config elsewhere either": (lambda copy: None, ["--hf-source", "{copy}"], "config.json is missing"),
    "two sources": (lambda copy: None, ["--base", "b", "--hf-source", "h"], "--hf-source has no effect with --base"),
    "a prompt without a check": (lambda copy: None, ["--prompt", "t1"], "--prompt is given without --check"),
    "no size of a file": (lambda copy: None, ["--max-shard-bytes", "0"], "'0' is not a whole number"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named(case: str, root: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    damage, file, foreign, message = DAMAGED[case]
    copy = Path(shutil.copytree(root / "checkpoint", tmp_path / "copy"))
    damage(copy / file)
    if foreign:
        (copy / "checkpoint.json").unlink()
    options = ["--hf-source", root / "hf"] if foreign else []
    line = refusal("to-hf", copy, tmp_path / "hf", *options)
    assert message in line and f"[{copy / file}]" in line
    assert list(tmp_path.iterdir()) == [copy]


@pytest.mark.parametrize("case", TO_HF)
def test_what_is_no_checkpoint_is_refused(case: str, root: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    damage, options, message = TO_HF[case]
    copy = Path(shutil.copytree(root / "checkpoint", tmp_path / "copy"))
    damage(copy)
    line = refusal("to-hf", copy, tmp_path / "hf", *(option.format(copy=copy) for option in options))
    assert message.format(copy=copy) in line
    assert not (tmp_path / "hf").exists() and len(list(tmp_path.iterdir())) <= 1


def test_the_config_of_another_model_is_refused(root: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    larger, deeper = make_hf_dir(tmp_path / "larger", intermediate_size=64), tmp_path / "deeper"
    make_hf_dir(deeper, num_hidden_layers=3)
    mixture = make_moe_hf_dir(tmp_path / "mixture")
    arguments = ["to-hf", root / "checkpoint", tmp_path / "target", "--hf-source"]
    line = refusal(*arguments, larger)
    assert "'decoder.layers.mlp.linear_fc1.weight' has shape [2, 112, 48]" in line and "[2, 128, 48]" in line
    assert "has shape [2, " in refusal(*arguments, deeper)
    assert "the checkpoint has no tensor 'decoder.layers.mlp.router" in refusal(*arguments, mixture)


@pytest.mark.parametrize(
    ("family", "sizes", "other", "lost"),
    [
        ("qwen3", {}, lambda path: make_hf_dir(path, tied=True), "1 tensors .*'output_layer.weight'"),
        (
            "qwen3",
            {},
            lambda path: make_hf_dir(path, family="llama"),
            "2 tensors .*'decoder.layers.self_attention.k_layernorm.weight'",
        ),
        (
            "qwen2",
            {},
            lambda path: make_hf_dir(path, family="llama", head_dim=12),
            "1 tensors .*'decoder.layers.self_attention.linear_qkv.bias'",
        ),
    ],
)
def test_no_weight_is_left_out_because_the_config_does_not_name_it(
    family: str, sizes: dict[str, int], other: Callable[[Path], Path], lost: str, tmp_path: Path
) -> None:
    to_megatron(make_hf_dir(tmp_path / "source", family=family, **sizes), tmp_path / "checkpoint")
    with pytest.raises(store.CheckpointError, match=f"{lost} first.*Fix: ") as caught:
        to_hf(tmp_path / "checkpoint", tmp_path / "hf", hf_source=other(tmp_path / "other"))
    assert caught.value.where == str(tmp_path / "checkpoint") and not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "does not exist"),
        (lambda copy: cut(copy / "model.safetensors"), "the file is cut off"),
        (lambda copy: (copy / "config.json").unlink(), "config.json is missing"),
        (lambda copy: save_file({"a": torch.zeros(1)}, copy / "model.safetensors"), "1 tensors do not belong"),
    ],
)
def test_what_is_no_hugging_face_directory_is_refused(
    damage: Callable[[Path], object], message: str, root: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    copy = Path(shutil.copytree(root / "hf", tmp_path / "copy"))
    damage(copy)
    line = refusal("to-megatron", copy, tmp_path / "checkpoint")
    assert message in line and str(copy) in line
    assert not (tmp_path / "checkpoint").exists()


def test_quantized_and_half_precision_weights_are_refused(
    root: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    arguments = ["to-megatron", str(tmp_path / "copy"), str(tmp_path / "checkpoint")]
    for dtype, message in ((torch.float8_e4m3fn, "type F8_E4M3"), (torch.float16, "weights in float16")):
        copy = Path(shutil.copytree(root / "hf", tmp_path / "copy"))
        save_file({name: tensor.to(dtype) for name, tensor in read(copy).items()}, copy / "model.safetensors")
        assert message in refusal(*arguments)
        assert dtype == torch.float16 or refusal(*arguments, "--dtype", "float32")
        shutil.rmtree(copy) if dtype != torch.float16 else None
    assert main(["convert", *arguments, "--dtype", "float32"]) == 0


def test_named_chat_templates_come_back(root: Path, tmp_path: Path) -> None:
    """transformers writes each but the default one into a directory."""
    source = Path(shutil.copytree(root / "hf", tmp_path / "hf"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(source)
    to_megatron(source, tmp_path / "checkpoint")
    to_hf(tmp_path / "checkpoint", tmp_path / "back")
    write_description({}, check_hf_dir(source).copied, tmp_path / "exported")  # what saves and exports write
    for path in (tmp_path / "checkpoint" / "hf", tmp_path / "back", tmp_path / "exported"):
        shutil.copy(source / "config.json", path)
        assert AutoTokenizer.from_pretrained(path).chat_template == tokenizer.chat_template, path


def test_an_existing_target_is_left_alone(root: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "target").write_text("mine")
    for direction, source in (("to-hf", "checkpoint"), ("to-megatron", "hf")):
        line = refusal(direction, root / source, tmp_path / "target")
        assert f"the target exists [{tmp_path / 'target'}]" in line
        line = refusal(direction, root / source, tmp_path / "target" / "below" / "it")
        assert f"cannot be created: {tmp_path / 'target'} is not a writable directory" in line
    assert (tmp_path / "target").read_text() == "mine"


@pytest.mark.parametrize(("direction", "source"), [("to-hf", "checkpoint"), ("to-megatron", "hf")])
def test_a_target_that_cannot_be_written_leaves_nothing(
    direction: str, source: str, root: Path, tmp_path: Path
) -> None:
    """Files may have 20 kB each: about the third tensor is too much."""
    done = call_forked(convert_with_small_files, 1, [direction, str(root / source), str(tmp_path / "target")], {})
    assert done.returncode == 1
    assert "cannot write" in done.stderr and "File too large" in done.stderr and len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_cannot_be_read_any_more_is_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    """Its disk fails under an open file: such an error names no file."""

    def fail(_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(safetensors_io, "_bytes_of", fail)
    line = refusal("to-megatron", root / "hf", tmp_path / "target", status=1)
    assert f"cannot read {root / 'hf' / 'model.safetensors'}: Input/output error" in line
    assert list(tmp_path.iterdir()) == []


def convert_with_small_files(arguments: list[str]) -> int:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    return main(["convert", *arguments])


def test_no_room_is_found_out_before_anything_is_written(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    monkeypatch.setattr(store, "RESERVE_BYTES", 2**60)
    for direction, source in (("to-hf", "checkpoint"), ("to-megatron", "hf")):
        assert "no room" in refusal(direction, root / source, tmp_path / "target", status=1)
    assert list(tmp_path.iterdir()) == []
