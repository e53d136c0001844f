"""Mixtures of experts that do not fit a layout are refused with the numbers and the fix; those that fit pass.

Not covered: whether accepted layouts run (tests/distributed/test_moe.py), and experts in a GPU engine.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from oblr_megatron.checks.layout import check_adapters, check_layout, num_experts
from oblr_megatron.checks.machine import check_pushable
from oblr_megatron.config import Config, parse_config
from oblr_megatron.errors import UserError

MODEL: dict[str, Any] = {  # of Qwen3-30B-A3B's config.json, smaller
    "model_type": "qwen3_moe",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 25,  # unused by layers with experts
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def config(tp: int, ep: int, etp: int | None = None, **parallel: Any) -> Config:
    sizes = {
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "sequence_parallel": tp > 1,
    }
    return parse_config(
        {"run_dir": "run", "model": {"path": "moe"}, "data": {"train": "t.jsonl"}, "parallel": sizes | parallel}
    )


@pytest.mark.parametrize(
    ("tp", "ep", "etp", "world_size"), [(1, 1, None, 1), (1, 6, None, 12), (2, 3, 2, 6), (4, 2, 1, 8), (2, 4, 1, 4)]
)
def test_layouts_that_divide_pass(tp: int, ep: int, etp: int | None, world_size: int) -> None:
    check_layout(MODEL, config(tp, ep, etp), world_size)


@pytest.mark.parametrize(
    ("parallel", "changes", "message"),
    [
        ({"tp": 1, "ep": 8}, {}, "num_experts 12 is not a multiple of expert_model_parallel_size 8"),
        ({"tp": 1, "ep": 2}, {"num_experts": 0}, "expert_model_parallel_size 2, .* for a model without experts"),
        ({"tp": 1, "ep": 1, "etp": 2}, {"num_experts": 0}, "tensor_parallel_size 2 for a model without experts"),
        ({"tp": 2, "ep": 1, "sequence_parallel": False}, {}, "tensor_model_parallel_size 2 .* sequence_parallel"),
        ({"tp": 2, "ep": 3, "etp": 1}, {}, "3 x expert_tensor_parallel_size 1 = 3 and the 2 ranks that share a sample"),
        ({"tp": 4, "ep": 1}, {"moe_intermediate_size": 18}, "18 is not a multiple of expert_tensor_parallel_size 4"),
        ({"tp": 1, "ep": 1}, {"mlp_only_layers": [0]}, "dense layers"),
        ({"tp": 1, "ep": 1}, {"decoder_sparse_step": 2}, "dense layers"),
        ({"tp": 1, "ep": 1}, {"num_experts_per_tok": 13}, "num_experts_per_tok 13 is more than the 12 experts"),
        ({"tp": 1, "ep": 1}, {"num_experts_per_tok": None}, "num_experts_per_tok = None in config.json"),
        ({"tp": 1, "ep": 1}, {"moe_intermediate_size": None}, "moe_intermediate_size = None in config.json"),
    ],
)
def test_layouts_that_do_not_fit(parallel: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_layout(MODEL | changes, config(**parallel), 24)
    assert caught.value.where and caught.value.fix


def test_experts_are_counted_under_either_key() -> None:
    """Published checkpoints have the first key; transformers writes the second."""
    assert num_experts({"num_experts": 128}) == 128
    assert num_experts({"num_local_experts": 128}) == 128
    assert num_experts({}) == 0


AUX = {"moe_aux_loss_coeff": 1e-3}


def run_with(model: dict[str, Any], mode: str) -> Config:
    tables: dict[str, Any] = {"run_dir": "run", "data": {"train": "t.jsonl"}, "gradnorm": {"mode": mode}}
    return parse_config(tables | {"model": {"path": "moe"} | model})


@pytest.mark.parametrize("losses", [AUX, {"moe_z_loss_coeff": 1e-4}])
def test_router_losses_need_experts_and_mode_two_pass(losses: dict[str, Any]) -> None:
    check_layout(MODEL, run_with(losses, "two_pass"), 1)
    with pytest.raises(UserError, match=r"moe_(aux|z)_loss_coeff"):
        check_layout(MODEL | {"num_experts": 0}, run_with(losses, "auto"), 1)
    for mode in ("stash", "bookkeep"):
        with pytest.raises(UserError, match=f"gradnorm.mode '{mode}': router losses"):
            run_with(losses, mode)


def test_routing_replay_needs_experts() -> None:
    config = run_with({"moe_routing_replay": True}, "auto")
    check_layout(MODEL, config, 1)
    with pytest.raises(UserError, match="moe_routing_replay") as caught:
        check_layout(MODEL | {"num_experts": 0}, config, 1)
    assert caught.value.where == "config: model"


@pytest.mark.parametrize(
    ("targets", "expert_ranks", "refused"),
    [
        (["q_proj", "gate_proj", "up_proj", "down_proj"], 1, ""),
        (["o_proj"], 2, ""),
        (["gate_proj", "up_proj", "down_proj"], 1, "of experts alone"),
        (["o_proj", "down_proj"], 2, "2 tensor-parallel ranks share"),
    ],
)
def test_adapters_of_experts(targets: list[str], expert_ranks: int, refused: str) -> None:
    """megatron-core's optimizer of dense weights is empty without an adapter of the attention, and cannot be saved."""
    base: dict[str, Any] = {"run_dir": "r", "data": {"train": "t.jsonl"}}
    base |= {"model": {"path": "m", "lora": {"rank": 8, "targets": targets}}}
    base["parallel"] = {"tensor_model_parallel_size": expert_ranks}
    with pytest.raises(UserError, match=rf"{refused}.*\[config: model.lora.targets\]") if refused else nullcontext():
        check_adapters(MODEL, parse_config(base))
    check_adapters(MODEL | {"num_experts": 0}, parse_config(base))


def test_engines_take_no_adapters_of_experts() -> None:
    base = {"run_dir": "r", "data": {"train": "t.jsonl"}, "model": {"path": "m", "lora": {"rank": 8}}}
    config = parse_config(base | {"rollout": {"lora": "adapter"}})
    check_adapters(MODEL | {"num_experts": 0}, config)
    with pytest.raises(UserError, match=r"no adapters of a mixture \[config: rollout.lora\]"):
        check_adapters(MODEL, config)


IN_FP32 = r"not in float32 \[config: rollout.lora\]"
TOO_LARGE = r"to 512, not 513 \[config: model.lora.rank\]. Fix: set rollout.lora"


@pytest.mark.parametrize(
    ("rank", "dtype", "engine", "pushed", "on_gpu", "refused"),
    [
        (8, "float32", "auto", "adapter", True, IN_FP32),
        (8, "bfloat16", "float32", "adapter", True, IN_FP32),
        (8, "float32", "bfloat16", "adapter", True, ""),
        (8, "bfloat16", "auto", "adapter", True, ""),
        (8, "float32", "auto", "merged", True, ""),
        (8, "float32", "auto", "adapter", False, ""),
        (512, "float32", "auto", "adapter", False, ""),
        (513, "float32", "auto", "merged", False, ""),
        (513, "float32", "auto", "adapter", False, TOO_LARGE),
    ],
)
def test_slots_on_a_gpu_are_in_bfloat16_and_have_ranks_up_to_512(
    rank: int, dtype: str, engine: str, pushed: str, on_gpu: bool, refused: str
) -> None:
    base: dict[str, Any] = {"run_dir": "r", "data": {"train": "t.jsonl"}}
    base |= {"model": {"path": "m", "dtype": dtype, "lora": {"rank": rank}}}
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_pushable(MODEL, parse_config(base | {"rollout": {"lora": pushed, "dtype": engine}}), on_gpu=on_gpu)


VERIFY = {"weights": {"verify": True}}


@pytest.mark.parametrize(
    ("model", "sections", "on_gpu"),
    [
        (MODEL, {}, True),
        (MODEL, VERIFY, False),
        (MODEL, VERIFY | {"rollout": {"replay": "saved"}}, True),
        (MODEL | {"num_experts": 0}, VERIFY, True),
    ],
)
def test_experts_can_be_verified_on_a_cpu_only(model: dict[str, Any], sections: dict[str, Any], on_gpu: bool) -> None:
    base: dict[str, Any] = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    check_pushable(model, parse_config(base | sections), on_gpu=on_gpu)
    with pytest.raises(UserError) as caught:
        check_pushable(MODEL, parse_config(base | VERIFY), on_gpu=True)
    assert caught.value.where == "config: weights.verify"
