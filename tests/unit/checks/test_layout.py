"""Layouts and models that do not fit are refused with both numbers and the fix; those that fit pass.

Not covered: whether accepted layouts run (tests/distributed).
"""

from __future__ import annotations

from typing import Any

import pytest

from oblr_megatron.checks.layout import check_layout
from oblr_megatron.config import Config, parse_config
from oblr_megatron.errors import UserError
from oblr_megatron.families import LLAMA3_ROPE

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "intermediate_size": 24,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, **LLAMA3_ROPE}


def config(tp: int = 1, pp: int = 1, **parallel: Any) -> Config:
    parallel = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp} | parallel
    model = {"path": "models/qwen"}
    return parse_config({"run_dir": "run", "model": model, "data": {"train": "t.jsonl"}, "parallel": parallel})


def refused(layout: dict[str, Any], world_size: int, message: str, **changes: Any) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_layout(MODEL | changes, config(**layout), world_size)
    assert caught.value.where and caught.value.fix


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {}),
        (7, {}),
        (6, {"tp": 2, "pp": 3}),
        (8, {"tp": 4}),  # TP 4 and 8 exceed the KV heads, which is allowed
        (48, {"tp": 8, "pp": 6}),
        (12, {"tp": 2, "pp": 2}),
        (6, {"pp": 3, "virtual_pipeline_model_parallel_size": 2}),
        (6, {"pp": 2, "account_for_embedding_and_loss": True, "virtual_pipeline_model_parallel_size": 2}),
        (6, {"pp": 2, "recompute_granularity": "full", "recompute_num_layers": 3}),
        (6, {"pp": 2, "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}),
        (6, {"context_parallel_size": 3, "packing": "packed"}),
    ],
)
def test_layouts_that_divide_pass(world_size: int, layout: dict[str, Any]) -> None:
    llama = {"model_type": "llama", "rope_scaling": LLAMA3, "hidden_size": 64, "head_dim": 16}
    for changes in ({}, llama, {"partial_rotary_factor": 1.0, "sliding_window": None}):
        check_layout(MODEL | changes, config(**layout), world_size)


VIRTUAL, FULL = "virtual_pipeline_model_parallel_size", {"recompute_granularity": "full", "recompute_num_layers": 2}
UNEVEN = {"account_for_embedding_and_loss": True}


@pytest.mark.parametrize(
    ("world_size", "layout", "message"),
    [
        (6, {"tp": 2, "pp": 2}, r"6 ranks .* = 4 ranks \[config: parallel\]. Fix: start a multiple of 4"),
        (1, {"tp": 2}, "1 rank cannot"),
        (16, {"tp": 16}, "num_attention_heads 8 is not a multiple of tensor_model_parallel_size 16"),
        (4, {"pp": 4}, "num_hidden_layers 6 is not a multiple of pipeline_model_parallel_size 4"),
        (6, {VIRTUAL: 2}, "virtual_pipeline_model_parallel_size 2 without pipeline"),
        (6, {"pp": 2, VIRTUAL: 2}, r"num_hidden_layers 6 is not a multiple of .* 2 x .* 2 = 4"),
        (6, {"pp": 3, VIRTUAL: 4}, r"num_hidden_layers 6 is not a multiple of .* 3 x .* 4 = 12"),
        (6, {"pp": 2} | FULL, "3 layers of a model chunk do not divide"),
        (6, UNEVEN, "account_for_embedding_and_loss without pipeline"),
        (6, {"pp": 3} | UNEVEN, r"num_hidden_layers \+ 2 = 8 is not a multiple of .* 3"),
        (6, {"pp": 2, VIRTUAL: 4} | UNEVEN, "leaves no layer for the first and last model chunk"),
        (6, {"pp": 2} | UNEVEN | FULL, "the 3 layers of a model chunk do not divide"),
    ],
)
def test_layouts_that_do_not_fit(world_size: int, layout: dict[str, Any], message: str) -> None:
    refused(layout, world_size, message)


@pytest.mark.parametrize(
    ("tp", "changes", "message"),
    [
        (8, {"intermediate_size": 20}, "intermediate_size 20 is not a multiple of tensor_model_parallel_size 8"),
        (1, {"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "6 and tensor_model_parallel_size 4 do not"),
        (1, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        (1, {"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type 'linear'"),
        (1, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported: vLLM would rotate a part"),
        (1, {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25 is not supported"),
        (1, {"rope_scaling": {"partial_rotary_factor": 0.75}}, "partial_rotary_factor 0.75 is not supported"),
        (1, {"rotary_pct": 0.5}, "rotary_pct 0.5 is not supported"),
        (1, {"attention_bias": True}, "attention_bias = true is not supported"),
        (1, {"use_sliding_window": True}, "use_sliding_window = true"),
        (1, {"dual_chunk_attention_config": {"chunk_size": 9}}, "dual_chunk_attention_config is not supported"),
        (1, {"model_type": "llama", "sliding_window": 4096}, "sliding_window 4096 is not supported"),
        (1, {"model_type": "qwen2", "hidden_size": 64, "head_dim": 16}, "head_dim 16 is not hidden_size 64 / num"),
        (1, {"model_type": "llama", "rope_parameters": LLAMA3 | {"high_freq_factor": 8.0}}, "high_freq_factor 8.0:"),
        (1, {"model_type": "qwen2", "rope_scaling": LLAMA3}, "rope_type 'llama3' is not supported for Qwen2"),
        (1, {"model_type": "llama", "mlp_bias": True}, "mlp_bias = true"),
        (1, {"model_type": "mistral"}, "model_type 'mistral' .* not supported .*Fix: .*Qwen2 .Qwen2ForCausalLM"),
        (1, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (1, {"num_hidden_layers": None}, "num_hidden_layers = None in config.json"),
    ],
)
def test_models_that_do_not_fit(tp: int, changes: dict[str, Any], message: str) -> None:
    refused({"tp": tp}, tp, message, **changes)
