"""Model directories in the forms of the wild: read, or refused with a remedy.

`source` is the thread or file that shows the form. Damaged files: test_hf_dir.py. Not covered: the weights' values.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oblr_megatron.checkpoint.hf_dir import INDEX, SINGLE, check_hf_dir
from oblr_megatron.errors import UserError

Change = Callable[[Path], object]
INDEXED = "model-00001-of-00002.safetensors"


def config(file: str = "config.json", drop: tuple[str, ...] = (), **values: object) -> Change:
    """Change keys of a JSON file, which may be absent."""

    def change(path: Path) -> None:
        content = json.loads((path / file).read_text()) if (path / file).exists() else {}
        kept = {name: value for name, value in content.items() if name not in drop}
        (path / file).write_text(json.dumps(kept | values))

    return change


def holds(*names: str, without: tuple[str, ...] = (SINGLE,)) -> Change:
    """Add empty files, and remove others; "/" alone is the whole content."""

    def change(path: Path) -> None:
        for name in [file.name for file in path.iterdir()] if without == ("/",) else without:
            (path / name).unlink()
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text("{}")

    return change


def named(rename: Callable[[str], str], **more: Tensor) -> Change:
    """Rename all tensors, and add others."""

    def change(path: Path) -> None:
        tensors = load_file(path / SINGLE)
        save_file({rename(name): tensor for name, tensor in tensors.items()} | more, path / SINGLE)

    return change


def eight_bits(path: Path) -> None:
    config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})(path)
    tensors = {name: t.to(torch.float8_e4m3fn) if t.dim() == 2 else t for name, t in load_file(path / SINGLE).items()}
    scales = {f"{name}_scale_inv": torch.ones(1, 1) for name, t in tensors.items() if t.dim() == 2}
    save_file(tensors | scales, path / SINGLE)


def without_a_shard(path: Path) -> None:
    tensors = load_file(path / SINGLE)
    (path / SINGLE).rename(path / INDEXED)
    places = dict.fromkeys(tensors, INDEXED) | {"lm_head.weight": INDEXED.replace("00001", "00002")}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


LORA: dict[str, Any] = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight": torch.ones(2, 48)}
THETA: dict[str, Any] = {"rope_theta": 10000.0}
LISTED = config("generation_config.json", eos_token_id=[1, 2], transformers_version="4.40.0")
TRAINED = holds("optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin", without=())
META = holds("checklist.chk", "consolidated.00.pth", "params.json", "tokenizer.model", without=("/",))
ADAPTER = holds("README.md", "adapter_config.json", "adapter_model.bin", without=("/",))
CACHE = holds("refs/main", "blobs/f5c3", "snapshots/c1899d/config.json", without=("/",))
ZERO = holds("latest", "pytorch_model.bin", "rng_state_0.pth", "zero_to_fp32.py", without=("/",))


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("sgl-project/sglang#14745", config(drop=("rope_parameters",), rope_scaling=None, **THETA)),
        ("vllm-project/vllm#28542", config(rope_parameters={"rope_type": "default"} | THETA)),
        ("vllm-project/vllm#28542, both", config(rope_parameters={"rope_type": "default"} | THETA, **THETA)),
        ("neuml/txtai#997, the older name", config(drop=("dtype",), torch_dtype="float32")),
        ("neuml/txtai#997, no name", config(drop=("dtype", "torch_dtype"))),
        ("vllm-project/vllm#4182", LISTED),
        ("quantization_config: null", config(quantization_config=None)),
        ("Blaizzy/mlx-vlm#309", config(eos_token_id=[1, 2])),
        ("mymusise/ChatGLM-Tuning#198, a trainer's checkpoint", TRAINED),
        ("ml-explore/mlx-lm#661", config("tokenizer_config.json", extra_special_tokens=["t3", "t4"])),
        ("transformers 4's classes", config("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")),
        ("huggingface/transformers#47110", config("special_tokens_map.json", additional_special_tokens=["t3"])),
    ],
)
def test_read(source: str, change: Change, tiny_hf: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_hf, tmp_path / "model"))
    change(path)
    before, after = check_hf_dir(tiny_hf), check_hf_dir(path)
    assert (after.shapes, after.fingerprint, after.tied) == (before.shapes, before.fingerprint, before.tied), source
    assert after.hf_config().rope_parameters == before.hf_config().rope_parameters
    assert after.tokenizer().get_vocab() == before.tokenizer().get_vocab()


@pytest.mark.parametrize(
    ("source", "change", "what", "fix"),
    [
        ("predibase/lorax#51", ADAPTER, "config.json is missing; the directory holds a PEFT adapter", "convert to-hf"),
        (
            "our checkpoint",
            holds("checkpoint.json", ".metadata", without=("/",)),
            "of a run",
            "convert to-hf CHECKPOINT DST",
        ),
        ("a run's config", config(drop=("model_type",), run_dir="runs/a"), "the directory of a run", "/hf"),
        ("huggingface/peft#298", ZERO, "DeepSpeed", "zero_to_fp32.py"),
        ("dphnAI/sonar#417", holds("a-Q4_K_M.gguf", without=("/",)), "GGUF", "original checkpoint"),
        ("Lightricks/ComfyUI-LTXVideo#163", holds("gemma.gguf"), "no weights.*GGUF", "original checkpoint"),
        ("huggingface/transformers#33746", META, "Meta's format", "Hugging Face format"),
        ("xorbitsai/inference#5403", CACHE, "a cache of the hub", "snapshots/c1899d"),
        (
            "verl-project/verl#298",
            holds("model_world_size_2_rank_0.pt", without=("/",)),
            "verl's",
            "model_merger merge",
        ),
        ("verl-project/verl#770", holds("../model_world_size_1_rank_0.pt"), "no weights.*verl", "model_merger merge"),
        ("lm-sys/FastChat#1530", holds(), "no weights", "complete the directory"),
        ("baichuan-inc/Baichuan2#145", holds("pytorch_model.bin"), "no weights.*bin files", "save_pretrained"),
        (
            "baichuan-inc/Baichuan2#145, its tokenizer",
            holds("tokenizer.model", without=("tokenizer.json",)),
            "no tokenizer",
            "convert tokenizer.model",
        ),
        (
            "meta-llama/llama#1393",
            holds(without=("tokenizer.json",)),
            "no tokenizer: tokenizer.json or vocab.json",
            "copy the tokenizer files",
        ),
        ("ggml-org/llama.cpp#5559", without_a_shard, "1 of 2 shards are missing", "download the missing files"),
        ("safetensors/safetensors#403", named("_orig_mod.{}".format), "'_orig_mod.", "remove '_orig_mod.' from"),
        ("FareedKhan-dev/train-llm-from-scratch#36", named("module.{}".format), "'module.", "remove 'module.' from"),
        ("verl-project/verl#4761", named("base_model.model.{}".format, **LORA), "'base_model.", "convert to-hf"),
        (
            "LlamaFactory#7212, a value head",
            named(str, **{"v_head.summary.weight": torch.ones(1, 48)}),
            "'v_head.summary.weight' first",
            "without added heads",
        ),
        (
            "vllm-project/vllm#8700",
            config(architectures=["Qwen3ForSequenceClassification"]),
            "Qwen3ForSequenceClassification",
            "give a model of one of these families",
        ),
        (
            "huggingface/optimum-benchmark#175",
            config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
            "quantised (bitsandbytes)",
            "unquantised",
        ),
        ("unslothai/unsloth#6200", eight_bits, "quantised (fp8)", "unquantised"),
    ],
)
def test_refused(source: str, change: Change, what: str, fix: str, tiny_hf: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_hf, tmp_path / "model"))
    change(path)
    with pytest.raises(UserError) as caught:
        check_hf_dir(path)
    beginning, _, rest = what.partition(".*")
    assert beginning in caught.value.what and rest in caught.value.what, source
    assert fix in caught.value.fix and caught.value.where.startswith(str(path)) and "\n" not in str(caught.value)


def test_the_name_of_a_model_of_the_hub_is_no_path() -> None:
    """verl takes it (volcengine/verl docs/start/quickstart.rst)."""
    with pytest.raises(UserError, match=r"does not exist.*hf download Qwen/Qwen3-0.6B --local-dir DIR"):
        check_hf_dir("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B-Base", "meta-llama/Llama-3.1-8B"])
def test_a_presets_missing_model_names_its_download(name: str) -> None:
    path = f"models/{name.partition('/')[2]}"
    with pytest.raises(UserError, match=rf"hf download {name} --local-dir {path}\)"):
        check_hf_dir(path)
    with pytest.raises(UserError) as caught:
        check_hf_dir("models/mine")
    assert "hf download" not in caught.value.fix
