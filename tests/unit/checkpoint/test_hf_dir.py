"""Checks of a model directory before loading.

Each case damages a complete directory, made by transformers, in one way; the error must name file and damage. Not
covered: wrong weight values.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from oblr_megatron.checkpoint import hf_dir
from oblr_megatron.checkpoint.hf_dir import INDEX, SINGLE, check_hf_dir
from oblr_megatron.errors import UserError
from oblr_megatron.weights.names import HF_EMBEDDING, HF_OUTPUT
from tests.tiny import make_hf_dir, make_moe_hf_dir, make_tokenizer

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("sharded") / "model", max_shard_size="20KB")


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a safetensors header, data untouched; padded to the old length where it became shorter."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + length :])


def a_shard(path: Path) -> Path:
    return sorted(path.glob("model-*.safetensors"))[0]


def test_a_complete_directory(tiny_hf: Path) -> None:
    found = check_hf_dir(tiny_hf)
    assert found.config["model_type"] == "qwen3" and not found.tied
    assert found.weight_files == (SINGLE,)
    assert found.shapes["model.embed_tokens.weight"] == (37, 48) and "lm_head.weight" in found.shapes
    assert found.num_bytes == (tiny_hf / SINGLE).stat().st_size
    assert found.hf_config().head_dim == 16


def test_a_directory_of_shards(sharded: Path, tiny_hf: Path) -> None:
    found = check_hf_dir(str(sharded))
    assert len(found.weight_files) > 2 and all((sharded / name).is_file() for name in found.weight_files)
    assert found.shapes == check_hf_dir(tiny_hf).shapes


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    path = make_moe_hf_dir(tmp_path / "model")
    found = check_hf_dir(path)
    assert found.shapes["model.layers.1.mlp.experts.3.down_proj.weight"] == (48, 20)
    assert found.hf_config().num_experts == 4
    config(num_local_experts=5)(path)
    with pytest.raises(UserError, match=r"6 tensors are missing .*'model.layers.0.mlp.experts.4."):
        check_hf_dir(path)
    config(num_local_experts=3)(path)
    with pytest.raises(UserError, match=r"6 tensors do not belong .*'model.layers.0.mlp.experts.3."):
        check_hf_dir(path)


def test_tied_embeddings_need_no_output_layer(tmp_path: Path) -> None:
    found = check_hf_dir(make_hf_dir(tmp_path / "model", tied=True))
    assert found.tied and "lm_head.weight" not in found.shapes


ROTARY = "model.layers.1.self_attn.rotary_emb."


@pytest.mark.parametrize(
    ("name", "accepted", "in_shards"),
    [
        (ROTARY + "inv_freq", True, False),
        (ROTARY + "cos_cached", True, True),
        (ROTARY + "sin_cached", True, False),
        ("model.rotary_emb.inv_freq", True, False),
        ("rotary_emb.inv_freq", True, False),
        (ROTARY + "inv_freq.weight", False, True),
        (ROTARY + "weight", False, False),
        ("model.layers.1.self_attn.inv_freq", False, False),
        ("model.inv_freq", False, False),
        ("model.layers.1.self_attn.bias", False, False),
    ],
)
def test_buffers_of_rotary_embeddings_are_skipped(
    name: str, accepted: bool, in_shards: bool, tiny_hf: Path, sharded: Path, tmp_path: Path
) -> None:
    path = copy(sharded if in_shards else tiny_hf, tmp_path)
    before = check_hf_dir(path)
    file = sorted(path.glob("*.safetensors"))[0]
    save_file(load_file(file) | {name: torch.ones(8)}, file, metadata={"format": "pt"})
    if in_shards:
        edit_json(path / INDEX, lambda index: index["weight_map"].update({name: file.name}))
    if not accepted:
        with pytest.raises(UserError, match=f"1 tensors do not belong to this model, '{name}' first"):
            check_hf_dir(path)
        return
    after = check_hf_dir(path)
    assert (after.shapes, after.dtypes, after.fingerprint) == (before.shapes, before.dtypes, before.fingerprint)


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 1200664\n"


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", SINGLE, "tokenizer.json", "tokenizer_config.json", "generation_config.json", "vocab.json"),
        *("special_tokens_map.json", "added_tokens.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
        *(INDEX, "the first shard", "the last shard"),
    ],
)
def test_pointers_of_git_lfs_are_named(name: str, tiny_hf: Path, sharded: Path, tmp_path: Path) -> None:
    path = copy(sharded if name == INDEX or "shard" in name else tiny_hf, tmp_path)
    if "shard" in name:
        name = sorted(file.name for file in path.glob("model-*"))[0 if "first" in name else -1]
    (path / name).write_text(POINTER)
    with pytest.raises(UserError, match=r"this is a Git LFS pointer.*git lfs pull") as caught:
        check_hf_dir(path)
    assert caught.value.where == str(path / name)


def _nudged(embedding: Tensor, row: int) -> Tensor:
    changed = embedding.clone()
    changed[row, 0] += 1e-3
    return changed


@pytest.mark.parametrize(
    ("head", "tied", "accepted"),
    [
        pytest.param(lambda embedding: embedding.clone(), True, True, id="an equal copy"),
        pytest.param(torch.randn_like, True, False, id="another head"),
        pytest.param(lambda embedding: _nudged(embedding, 0), True, False, id="one value at the start"),
        pytest.param(lambda embedding: _nudged(embedding, -1), True, False, id="one value at the end"),
        pytest.param(torch.zeros_like, True, False, id="zeros"),
        pytest.param(lambda embedding: embedding.bfloat16(), True, False, id="rounded"),
        pytest.param(lambda embedding: embedding[:-1].clone(), True, False, id="a row fewer"),
        pytest.param(lambda embedding: embedding.t().contiguous(), True, False, id="transposed"),
        pytest.param(torch.randn_like, False, True, id="untied"),
        pytest.param(torch.randn_like, None, True, id="no key: untied"),
        pytest.param(lambda embedding: embedding.clone(), False, True, id="untied, and equal as yet"),
    ],
)
def test_a_stored_output_layer_of_a_tied_model_is_the_embedding(
    head: Callable[[Tensor], Tensor],
    tied: bool | None,
    accepted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM loads the stored one if it differs, and a push of a tied model sends no output layer."""
    monkeypatch.setattr(hf_dir, "COMPARED_BYTES", 1000)
    path = make_hf_dir(tmp_path / "model", tied=True)
    tensors = load_file(path / SINGLE)
    output = {HF_OUTPUT: head(tensors[HF_EMBEDDING])}
    edit_json(path / "config.json", lambda content: content.update(tie_word_embeddings=tied))
    if tied is None:
        edit_json(path / "config.json", lambda content: content.pop("tie_word_embeddings"))

    def check() -> None:
        if accepted:
            assert check_hf_dir(path).tied == bool(tied)
            return
        with pytest.raises(UserError, match=r"another 'lm_head.weight'.*\"tie_word_embeddings\": false"):
            check_hf_dir(path)

    save_file(tensors | output, path / SINGLE)
    check()
    (path / SINGLE).unlink()
    for name, held in (("a.safetensors", tensors), ("b.safetensors", output)):
        save_file(held, path / name)
    places = dict.fromkeys(tensors, "a.safetensors") | {HF_OUTPUT: "b.safetensors"}
    (path / INDEX).write_text(json.dumps({"weight_map": places}))
    check()


def test_a_tokenizer_in_two_files_is_accepted(tiny_hf: Path, tmp_path: Path) -> None:
    path = copy(tiny_hf, tmp_path)
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text("{}")
    (path / "merges.txt").write_text("")
    check_hf_dir(path)


def test_a_byte_level_tokenizer_of_another_class_is_refused(tmp_path: Path) -> None:
    """R1-Distill-Llama names LlamaTokenizerFast. The model type decides, so Qwen2's distillations load as they are."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    path = make_hf_dir(tmp_path / "model", head_dim=32, vocab_size=len(letters) + 3, family="llama")  # Llama adds 3
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    text = "What is\n 2 + 3?"
    assert (loaded := check_hf_dir(path).tokenizer()).decode(loaded.encode(text)) == text
    named = path / "tokenizer_config.json"
    edit_json(named, lambda content: content.update(tokenizer_class="LlamaTokenizerFast"))
    with pytest.raises(UserError, match="loses spaces and line ends") as caught:
        check_hf_dir(path).tokenizer()
    assert caught.value.where == str(named) and "PreTrainedTokenizerFast" in caught.value.fix


@pytest.mark.parametrize(
    ("indexed", "name"),
    [
        (False, "model-00001-of-00002.safetensors"),
        (False, "consolidated.safetensors"),
        (True, "consolidated.00.safetensors"),
        (True, "original/consolidated.safetensors"),
    ],
)
def test_other_weights_that_vllm_would_load_are_refused(
    indexed: bool, name: str, tiny_hf: Path, sharded: Path, tmp_path: Path
) -> None:
    path = copy(sharded if indexed else tiny_hf, tmp_path)
    (path / "original").mkdir()
    shutil.copy(tiny_hf / SINGLE, path / ("adapter.safetensors" if indexed else "original/model.safetensors"))
    check_hf_dir(path)  # these are not read
    shutil.copy(tiny_hf / SINGLE, path / name)
    with pytest.raises(UserError, match="vLLM would load this file, too") as caught:
        check_hf_dir(path)
    assert caught.value.where == str(path / name)


def test_a_single_file_that_transformers_prefers_to_the_index_is_refused(sharded: Path, tmp_path: Path) -> None:
    """It may be of another version. An index of this one file is harmless."""
    path = copy(sharded, tmp_path)
    other = make_hf_dir(tmp_path / "other", seed=1)
    shutil.copy(other / SINGLE, path)
    with pytest.raises(UserError, match="transformers would load this file") as caught:
        check_hf_dir(path)
    assert caught.value.where == str(path / SINGLE)
    loaded = Qwen3ForCausalLM.from_pretrained(path).state_dict()["model.embed_tokens.weight"]
    assert torch.equal(loaded, load_file(other / SINGLE)["model.embed_tokens.weight"]), "transformers' rule"
    edit_json(path / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": SINGLE}))
    with pytest.raises(UserError, match="transformers would load this file"):
        check_hf_dir(path)
    edit_json(path / INDEX, lambda index: index.update(weight_map=dict.fromkeys(index["weight_map"], SINGLE)))
    assert check_hf_dir(path).weight_files == (SINGLE,)


def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def swap_shards(path: Path) -> None:
    """An index of another version, with a tensor in the wrong shard."""
    first, second = sorted(path.glob("model-*.safetensors"))[:2]

    def change(index: dict[str, Any]) -> None:
        tensor = next(name for name, shard in index["weight_map"].items() if shard == first.name)
        index["weight_map"][tensor] = second.name

    edit_json(path / INDEX, change)


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Save the weights again after a change."""
    tensors = load_file(path / SINGLE)
    change(tensors)
    save_file(tensors, path / SINGLE, metadata={"format": "pt"})


def declare(path: Path, tensor: str, **fields: object) -> None:
    """Change what the header says of a tensor; its data stay."""
    edit_header(path / SINGLE, lambda header: header[tensor].update(fields))


def config(**values: object) -> Callable[[Path], object]:
    """Change keys of config.json."""
    return lambda path: edit_json(path / "config.json", lambda content: content.update(values))


DAMAGE_SINGLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), "config.json is missing"),
    "config is no JSON": (lambda path: cut(path / "config.json", 20), "not JSON"),
    "config is a list": (lambda path: (path / "config.json").write_text("[]"), "not a JSON object"),
    "another model": (
        config(model_type="gpt2", architectures=["GPT2"]),
        "model_type 'gpt2' with architectures ['GPT2'] is not supported",
    ),
    "a mixture of experts by name only": (config(architectures=["Qwen3MoeForCausalLM"]), "Qwen3MoeForCausalLM"),
    "config incomplete": (
        lambda path: edit_json(path / "config.json", lambda c: c.pop("head_dim")),
        "head_dim is None",
    ),
    "config with a fraction": (config(vocab_size=37.0), "vocab_size is 37.0"),
    "config with a text for a table": (config(rope_scaling="linear"), "rope_scaling is 'linear'"),
    "config with a list for a table": (config(rope_parameters=["linear"]), "rope_parameters is ['linear']"),
    "config with a method for a table": (config(quantization_config="fp8"), "quantization_config is 'fp8'"),
    "config with a text for a factor": (config(rope_scaling={"factor": "8"}), "rope_scaling.factor is '8'"),
    "config with a text for the newer factor": (
        lambda path: edit_json(path / "config.json", lambda c: c["rope_parameters"].update(factor="8")),
        "rope_parameters.factor is '8'",
    ),
    "config with too many brackets": (lambda path: (path / "config.json").write_text("[" * 10**6), "not JSON"),
    "config without a rounding": (config(rms_norm_eps=math.nan), "rms_norm_eps is nan"),
    "config with billions of layers": (config(num_hidden_layers=10**10), "num_hidden_layers 10000000000"),
    "config of another size": (config(hidden_size=64), "has shape [37, 48], but config.json implies [37, 64]"),
    "config with more layers": (config(num_hidden_layers=3), "11 tensors are missing from the weights, 'model.layers"),
    "weights cut off by a byte": (lambda path: cut(path / SINGLE, -1), "the file is cut off"),
    "weights cut off in the header": (lambda path: cut(path / SINGLE, 100), "cut off inside its header"),
    "weights empty": (lambda path: cut(path / SINGLE, 0), "cut off inside its header"),
    "weights too long": (lambda path: (path / SINGLE).open("ab").write(b"0"), "the file is too long"),
    "no safetensors": (lambda path: (path / SINGLE).write_bytes(b"\x80\x02}q\x00." * 99), "not a safetensors file"),
    "header is a list": (lambda path: (path / SINGLE).write_bytes(struct.pack("<Q", 2) + b"[]"), "not a safetensors"),
    "shape of another model": (
        lambda path: rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(49)})),
        "'model.norm.weight' has shape [49]",
    ),
    "a dtype that cannot be read": (
        lambda path: rewrite(path, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.int8)})),
        f"'{Q_PROJ}' has dtype I8, but only F64, F32, F16, BF16 ",
    ),
    "shape and size disagree": (lambda path: declare(path, "model.norm.weight", shape=[49]), "not a safetensors file"),
    "a dtype and its size disagree": (lambda path: declare(path, Q_PROJ, dtype="BF16"), "not a safetensors file"),
    "offsets are no numbers": (lambda path: declare(path, Q_PROJ, data_offsets="01"), "not a safetensors file"),
    "tensors overlap": (lambda path: declare(path, Q_PROJ, data_offsets=[0, 12288]), "not a safetensors file"),
    "a tensor is missing": (
        lambda path: rewrite(path, lambda tensors: tensors.pop("lm_head.weight")),
        "1 tensors are missing from the weights, 'lm_head.weight' first",
    ),
}

DAMAGE_SHARDED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is cut off": (lambda path: cut(a_shard(path), -5), "the file is cut off"),
    "index and shards disagree": (swap_shards, "lacks 1 tensors that the index names"),
    "the index is no JSON": (lambda path: cut(path / INDEX, 30), "not JSON"),
    "the index is empty": (lambda path: (path / INDEX).write_text("{}"), "no weight_map"),
    "the index leaves a tensor out": (
        lambda path: edit_json(path / INDEX, lambda index: lose_tensor(path, index)),
        "missing from the weights",
    ),
}


def lose_tensor(path: Path, index: dict[str, Any]) -> None:
    """Take a shard with everything it holds out of the index."""
    shard = a_shard(path).name
    index["weight_map"] = {tensor: name for tensor, name in index["weight_map"].items() if name != shard}


@pytest.mark.parametrize("case", [*DAMAGE_SINGLE, *DAMAGE_SHARDED])
def test_damage_is_named(case: str, tiny_hf: Path, sharded: Path, tmp_path: Path) -> None:
    damage, named = (DAMAGE_SINGLE | DAMAGE_SHARDED)[case]
    path = copy(tiny_hf if case in DAMAGE_SINGLE else sharded, tmp_path)
    damage(path)
    with pytest.raises(UserError) as caught:
        check_hf_dir(path)
    message = str(caught.value)
    assert named in message and caught.value.where.startswith(str(path)) and "\n" not in message
    assert caught.value.fix


def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("nowhere", "file"):
        with pytest.raises(UserError) as caught:
            check_hf_dir(tmp_path / name)
        assert caught.value.where == str(tmp_path / name)


def test_a_damaged_tokenizer_is_a_user_error(tmp_path: Path) -> None:
    path = make_hf_dir(tmp_path / "model")
    (path / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(UserError, match="tokenizer") as caught:
        check_hf_dir(path).tokenizer()
    assert caught.value.where == str(path)


def test_a_configuration_that_transformers_refuses(tiny_hf: Path, tmp_path: Path) -> None:
    path = copy(tiny_hf, tmp_path)
    config(initializer_range="wide")(path)
    found = check_hf_dir(path)
    for read in (found.hf_config, found.tokenizer):
        with pytest.raises(UserError, match="initializer_range") as caught:
            read()
        assert caught.value.where == str(path / "config.json") and "\n" not in str(caught.value)


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows(tiny_hf: Path, tmp_path: Path) -> None:
    path = copy(tiny_hf, tmp_path)
    make_tokenizer(40).save_pretrained(path)
    with pytest.raises(UserError, match=r"40 tokens.*vocab_size is 37.*'t37' has id 37") as caught:
        check_hf_dir(path).tokenizer()
    assert caught.value.where == str(path)
    make_tokenizer(30).save_pretrained(path)
    assert len(check_hf_dir(path).tokenizer()) == 30, "an embedding may have more rows, as in published models"


def test_an_added_token_beyond_the_embedding(tiny_hf: Path, tmp_path: Path) -> None:
    path = copy(tiny_hf, tmp_path)
    tokenizer = make_tokenizer(37)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(path)
    with pytest.raises(UserError, match=r"38 tokens.*'<think>' has id 37"):
        check_hf_dir(path).tokenizer()


def test_the_fingerprint_is_that_of_the_weights(tiny_hf: Path, sharded: Path, tmp_path: Path) -> None:
    own = check_hf_dir(tiny_hf).fingerprint
    assert own == check_hf_dir(sharded).fingerprint, "the files are divided otherwise"
    assert own != check_hf_dir(make_hf_dir(tmp_path / "other", seed=1)).fingerprint
    path = copy(tiny_hf, tmp_path)
    rewrite(path, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].mul_(1.001))
    assert own != check_hf_dir(path).fingerprint
    tied = make_hf_dir(tmp_path / "tied", tied=True)
    before = check_hf_dir(tied).fingerprint
    rewrite(tied, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert check_hf_dir(tied).fingerprint == before, "some copies store the tied output layer"


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja", "tokenizer_config.json"])
def test_a_file_that_saves_could_not_copy_is_refused(
    name: str, tiny_hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as root, so the answer of the system is replaced."""
    path = shutil.copytree(tiny_hf, tmp_path / "model")
    (path / name).touch()
    monkeypatch.setattr(os, "access", lambda file, mode: Path(file).name != name or mode != os.R_OK)
    with pytest.raises(UserError, match="cannot read the file") as caught:
        check_hf_dir(path)
    assert caught.value.where == str(path / name)
