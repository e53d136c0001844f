"""Predicted memory of an engine: weights against transformers' count, cache and constants against vLLM's own.

Not covered: an engine on a GPU. Working memory and the memory of a sleeping engine are estimates without a comparison.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE
from vllm.usage.usage_lib import UsageContext
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.kv_cache_interface import FullAttentionSpec

from oblr_megatron.checks.vllm_options import CACHE_BYTES
from oblr_megatron.config import Config
from oblr_megatron.config.data import EvaluateConfig
from oblr_megatron.memory.engine import LARGE_DEVICE, STEP_TOKENS, EngineMemory, engine_bytes
from oblr_megatron.model.published import published
from oblr_megatron.model.transformer_config import hf_config_of
from oblr_megatron.padding import VOCABULARY_MULTIPLE
from tests.unit.configs import config_with

GPU = 80 * 10**9


def run(**rollout: Any) -> Config:
    return config_with(model={"dtype": "bfloat16"}, rollout=rollout)


def whole_model(name: str) -> dict[str, int]:
    """Elements of every weight as transformers has it, by name."""
    config = published(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config_of(config))
    return {name: weight.numel() for name, weight in model.named_parameters()}


def test_vllms_own_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VOCABULARY_MULTIPLE == DEFAULT_VOCAB_PADDING_SIZE
    platform = SimpleNamespace(get_device_name=lambda: "h100", is_tpu=lambda: False, is_cpu=lambda: False)
    monkeypatch.setattr("vllm.engine.arg_utils.current_platform", platform)
    for size in (LARGE_DEVICE - 1, LARGE_DEVICE):
        monkeypatch.setattr(platform, "get_device_total_memory", lambda size=size: size, raising=False)
        tokens, _ = EngineArgs.get_batch_defaults(1)
        assert tokens[UsageContext.LLM_CLASS] == STEP_TOKENS[size >= LARGE_DEVICE]


@pytest.mark.parametrize("name", ["0.6B", "8B", "30B-A3B", "Qwen2.5-7B"])
def test_weights_on_one_device_are_the_models(name: str) -> None:
    weights = whole_model(name)
    assert engine_bytes(published(name), run(), device_bytes=10**15).weights == 2 * sum(weights.values())
    matrices = sum(size for name, size in weights.items() if "proj" in name and "bias" not in name)
    rounded = engine_bytes(published(name), run(quantization="fp8"), device_bytes=10**15).weights
    assert rounded == 2 * sum(weights.values()) - matrices


@pytest.mark.parametrize("kind", sorted(CACHE_BYTES))
def test_bytes_of_a_cached_number_are_vllms(kind: str) -> None:
    found, plain = (
        engine_bytes(published("8B"), run(vllm=options), device_bytes=GPU).kv_bytes_per_token
        for options in ({"kv_cache_dtype": kind}, {"kv_cache_dtype": "auto"})
    )
    assert found == plain * STR_DTYPE_TO_TORCH_DTYPE[kind].itemsize / torch.bfloat16.itemsize


@pytest.mark.parametrize(("width", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_cache_bytes_per_token_are_vllms(width: int, heads: int) -> None:
    """Qwen3-30B-A3B has four key heads: each of eight devices holds a copy of one."""
    config = published("30B-A3B")
    found = engine_bytes(config, run(tensor_parallel_size=width), device_bytes=GPU)
    layer = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=128, dtype=torch.bfloat16)
    assert found.kv_bytes_per_token == layer.page_size_bytes * config["num_hidden_layers"] // 16


def test_copied_heads_count_as_weights() -> None:
    config = published("30B-A3B")
    four, eight = (engine_bytes(config, run(tensor_parallel_size=n), device_bytes=10**15).weights * n for n in (4, 8))
    copies = 2 * 4 * config["head_dim"] * config["hidden_size"] * config["num_hidden_layers"] * 2  # k and v, bf16
    norms = 2 * (4 * 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 4 * 2048)  # norms and routers are whole on every device
    assert eight - four == copies + norms


def test_the_cache_is_the_rest_of_vllms_share() -> None:
    found = engine_bytes(published("8B"), run(gpu_memory_utilization=0.5), device_bytes=GPU)
    assert found.total == GPU // 2 and found.kv_cache == GPU // 2 - found.weights - found.other > 0
    assert engine_bytes(published("32B"), run(), device_bytes=GPU).kv_cache == 0
    on_cpu = engine_bytes(published("0.6B"), run(kv_cache_gib=0.25), device_bytes=None)
    assert on_cpu.kv_cache == 2**28 and on_cpu.total == on_cpu.weights + 2**28 + on_cpu.other


def test_a_cpu_engine_works_on_the_longest_evaluated_prompt() -> None:
    """It takes a whole prompt in one step."""
    short, long = (
        engine_bytes(published("0.6B"), run().model_copy(update={"evaluate": evaluate}), device_bytes=None).other
        for evaluate in (EvaluateConfig(), EvaluateConfig(max_response_tokens=30000))
    )
    assert long > short


def test_a_cpu_engine_works_on_a_token_of_every_sequence() -> None:
    """8,192 of them need what a prompt of 8,192 tokens needs."""
    many = run(max_num_seqs=8192)
    long = many.model_copy(update={"evaluate": EvaluateConfig(max_response_tokens=8192 - many.data.max_prompt_tokens)})
    both = {engine_bytes(published("0.6B"), config, device_bytes=None).other for config in (many, long)}
    assert len(both) == 1


def test_memory_of_a_sleeping_engine() -> None:
    found = EngineMemory(weights=10**10, kv_cache=10**10, other=5 * 10**9, kv_bytes_per_token=100)
    assert found.asleep(0) == found.total == 25 * 10**9 and found.asleep(1) == found.asleep(2) == 2 * 2**30
    assert found.kv_tokens == 10**8
