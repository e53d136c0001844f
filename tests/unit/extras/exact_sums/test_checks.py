"""model.batch_invariant refuses, by the key, everything that would give trainer and engine other bits.

Not covered: whether what passes has equal bits (tests/e2e/test_zero_mismatch.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from oblr_megatron.config import Config
from oblr_megatron.errors import UserError
from oblr_megatron.extras.exact_sums.checks import check_invariant
from tests.unit.configs import config_with

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "head_dim": 128,
    "vocab_size": 151_936,
}


def config(*overrides: str) -> Config:
    return config_with("model.batch_invariant=true", *overrides)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.dtype=float64", "model.dtype"),
        ("rollout.dtype=bfloat16", "rollout.dtype"),
        ("parallel.tensor_model_parallel_size=2", "parallel.tensor_model_parallel_size"),
        ("rollout.tensor_parallel_size=2", "parallel.tensor_model_parallel_size"),
        ("rollout.top_p=0.9", "rollout.top_p"),
        ("rollout.top_k=2000", "rollout.top_k"),
        ("rollout.min_p=0.1", "rollout.min_p"),
        ("rollout.speculation=ngram", "rollout.speculation"),
        ("rollout.servers=http://a:1", "rollout.servers"),
        ("rollout.vllm.kv_cache_dtype=auto", "rollout.vllm"),
        ("rollout.max_response_tokens=8192", "model.path"),
    ],
)
def test_it_names_the_key(override: str, key: str) -> None:
    with pytest.raises(UserError) as caught:
        check_invariant(MODEL, config(override), on_gpu=False)
    assert caught.value.where == f"config: {key}" and caught.value.fix


@pytest.mark.parametrize(
    ("change", "fact"),
    [({"num_experts": 8}, "mixture"), ({"intermediate_size": 9000}, "9000"), ({"vocab_size": 300_000}, "300000")],
)
def test_models_that_it_cannot_compute(change: dict[str, Any], fact: str) -> None:
    with pytest.raises(UserError) as caught:
        check_invariant(MODEL | change, config(), on_gpu=False)
    assert fact in caught.value.what


def test_what_keeps_the_bits_passes() -> None:
    layout = ("parallel.pipeline_model_parallel_size=2", "parallel.context_parallel_size=2", "parallel.packing=packed")
    for dtype in ("float32", "bfloat16"):
        check_invariant(MODEL, config(*layout, f"model.dtype={dtype}", "rollout.vllm.block_size=32"), on_gpu=False)


def test_gpus_are_refused() -> None:
    with pytest.raises(UserError, match="no common kernels") as caught:
        check_invariant(MODEL, config("model.dtype=bfloat16"), on_gpu=True)
    assert caught.value.where == "config: model.batch_invariant"
