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


@pytest.mark.parametrize(
    ("tp", "pp", "world_size"), [(1, 1, 1), (1, 1, 7), (2, 3, 6), (4, 1, 8), (8, 6, 48), (2, 2, 12)]
)
def test_layouts_that_divide_pass(tp: int, pp: int, world_size: int) -> None:
    check_layout(MODEL, config(tp, pp), world_size)  # TP 4 and 8 exceed the KV heads, which is allowed
    check_layout(MODEL | {"model_type": "llama", "rope_scaling": LLAMA3}, config(tp, pp), world_size)
    check_layout(MODEL | {"partial_rotary_factor": 1.0}, config(tp, pp), world_size)


@pytest.mark.parametrize(
    ("tp", "pp", "world_size", "changes", "message"),
    [
        (2, 2, 6, {}, r"6 ranks .* = 4 ranks \[config: parallel\]. Fix: start a multiple of 4"),
        (2, 1, 1, {}, "1 rank cannot"),
        (16, 1, 16, {}, "num_attention_heads 8 is not a multiple of tensor_model_parallel_size 16"),
        (1, 4, 4, {}, "num_hidden_layers 6 is not a multiple of pipeline_model_parallel_size 4"),
        (8, 1, 8, {"intermediate_size": 20}, "intermediate_size 20 is not a multiple of tensor_model_parallel_size 8"),
        (1, 1, 1, {"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        (4, 1, 4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "6 and tensor_model_parallel_size 4 do not"),
        (1, 1, 1, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        (1, 1, 1, {"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type 'linear'"),
        (
            1,
            1,
            1,
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5 is not supported: vLLM would rotate a part",
        ),
        (1, 1, 1, {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25 is not supported"),
        (1, 1, 1, {"rope_scaling": {"partial_rotary_factor": 0.75}}, "partial_rotary_factor 0.75 is not supported"),
        (1, 1, 1, {"rotary_pct": 0.5}, "rotary_pct 0.5 is not supported"),
        (1, 1, 1, {"attention_bias": True}, "attention_bias = true is not supported"),
        (1, 1, 1, {"use_sliding_window": True}, "use_sliding_window = true"),
        (
            1,
            1,
            1,
            {"model_type": "qwen2", "hidden_size": 64, "head_dim": 16},
            "head_dim 16 is not hidden_size 64 / num",
        ),
        (
            1,
            1,
            1,
            {"model_type": "llama", "rope_parameters": LLAMA3 | {"high_freq_factor": 8.0}},
            "high_freq_factor 8.0:",
        ),
        (1, 1, 1, {"model_type": "qwen2", "rope_scaling": LLAMA3}, "rope_type 'llama3' is not supported for Qwen2"),
        (1, 1, 1, {"model_type": "llama", "mlp_bias": True}, "mlp_bias = true"),
        (1, 1, 1, {"model_type": "mistral"}, "model_type 'mistral' .* not supported .*Fix: .*Qwen2 .Qwen2ForCausalLM"),
        (1, 1, 1, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (1, 1, 1, {"num_hidden_layers": None}, "num_hidden_layers = None in config.json"),
    ],
)
def test_layouts_that_do_not_fit(tp: int, pp: int, world_size: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_layout(MODEL | changes, config(tp, pp), world_size)
    assert caught.value.where
    assert caught.value.fix


@pytest.mark.parametrize(
    ("pp", "parallel"),
    [
        (3, {"virtual_pipeline_model_parallel_size": 2}),
        (2, {"account_for_embedding_and_loss": True, "virtual_pipeline_model_parallel_size": 2}),
        (2, {"recompute_granularity": "full", "recompute_num_layers": 3}),
        (2, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}),
        (1, {"context_parallel_size": 3, "packing": "packed"}),
    ],
)
def test_further_layouts_that_fit_pass(pp: int, parallel: dict[str, Any]) -> None:
    check_layout(MODEL, config(pp=pp, **parallel), 6)


@pytest.mark.parametrize(
    ("pp", "parallel", "message"),
    [
        (1, {"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size 2 without pipeline"),
        (2, {"virtual_pipeline_model_parallel_size": 2}, r"num_hidden_layers 6 is not a multiple of .* 2 x .* 2 = 4"),
        (3, {"virtual_pipeline_model_parallel_size": 4}, r"num_hidden_layers 6 is not a multiple of .* 3 x .* 4 = 12"),
        (2, {"recompute_granularity": "full", "recompute_num_layers": 2}, "3 layers of a model chunk do not divide"),
        (1, {"account_for_embedding_and_loss": True}, "account_for_embedding_and_loss without pipeline"),
        (3, {"account_for_embedding_and_loss": True}, r"num_hidden_layers \+ 2 = 8 is not a multiple of .* 3"),
        (
            2,
            {"account_for_embedding_and_loss": True, "virtual_pipeline_model_parallel_size": 4},
            "leaves no layer for the first and last model chunk",
        ),
        (
            2,
            {"account_for_embedding_and_loss": True, "recompute_granularity": "full", "recompute_num_layers": 2},
            "the 3 layers of a model chunk do not divide",
        ),
    ],
)
def test_further_layouts_that_do_not_fit(pp: int, parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_layout(MODEL, config(pp=pp, **parallel), 6)
    assert caught.value.where
    assert caught.value.fix
