"""Megatron's options: which ones are refused and why, and which reach megatron-core.

What allowed options do: tests/distributed (test_distributed_optimizer.py, test_overlap.py, test_recompute.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oblr_megatron.algo.snr import ESTIMATORS
from oblr_megatron.checks.layout import check_recompute
from oblr_megatron.checks.machine import Machine, check_machine
from oblr_megatron.config import Config, ParallelConfig, parse_config
from oblr_megatron.config.algo import SnrConfig
from oblr_megatron.config.refused import REFUSED
from oblr_megatron.errors import UserError
from oblr_megatron.model.optimizer import optimizer_implementation
from oblr_megatron.model.shards import put_back, rectangles
from oblr_megatron.model.transformer_config import _recompute
from oblr_megatron.types import GradientStats

ENGINE = Machine((9, 0), "13.0", "2.11.0")
NORMLESS = ("algo.baseline=rloo", "algo.snr.estimator=momentum")
DOC = Path(__file__).parents[3] / "docs" / "parallel.md"


def configured(*overrides: str) -> Config:
    table = {"run_dir": "r", "num_steps": 1, "model": {"path": "m"}, "data": {"train": "d.jsonl"}}
    return parse_config(table, overrides=list(overrides))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("optimizer.name=sgd", "parallel.use_distributed_optimizer=true"), "optimizer.name 'sgd'"),
        (("model.dtype=float64", "parallel.use_distributed_optimizer=true"), "model.dtype 'float64'"),
        (("parallel.overlap_grad_reduce=true",), "algo.baseline 'pooled' needs"),
        (("parallel.overlap_grad_reduce=true", *NORMLESS, "gradnorm.always=true"), "gradnorm.always needs"),
        (("parallel.overlap_grad_reduce=true", *NORMLESS, "algo.norm_power=0.25"), "algo.norm_power 0.25 needs"),
        (("parallel.overlap_grad_reduce=true", "algo.baseline=rloo"), "algo.snr.estimator 'folds'"),
        (("parallel.overlap_grad_reduce=true", "algo.baseline=rloo", "algo.snr.estimator=prompts"), "'prompts'"),
        (("parallel.overlap_grad_reduce=true", "algo.baseline=rloo", "algo.snr.estimator=plugin"), "'plugin'"),
    ],
)
def test_refused_with_the_reason_and_a_fix(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError) as caught:
        configured(*overrides)
    assert said in caught.value.what and caught.value.fix, caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.use_distributed_optimizer=true",),
        ("parallel.use_distributed_optimizer=true", "model.dtype=bfloat16", "gradnorm.mode=stash"),
        ("parallel.overlap_grad_reduce=true", *NORMLESS),
        ("parallel.overlap_grad_reduce=true", "parallel.use_distributed_optimizer=true", *NORMLESS),
        ("parallel.recompute_granularity=selective", 'parallel.recompute_modules=["layernorm","mlp","core_attn"]'),
    ],
)
def test_allowed(overrides: tuple[str, ...]) -> None:
    configured(*overrides)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_overlap_allows_the_estimators_that_need_no_norms_of_folds(name: str) -> None:
    """With overlap the norms of folds and of samples are unknown."""
    stats = GradientStats(0.0, 1.0, float("nan"), 4, 0.0, 0.0, 0.0, 1, momentum_dot=0.25)
    assert ESTIMATORS[name](stats, 8).defined != SnrConfig.model_validate({"estimator": name}).needs_folds


def recomputing(*modules: str) -> ParallelConfig:
    return ParallelConfig.model_validate({"recompute_granularity": "selective", "recompute_modules": modules})


def test_recomputed_modules_reach_megatron_core() -> None:
    found = _recompute(recomputing("mlp", "layernorm"))
    assert found == {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}
    for machine, modules in (
        (Machine(), ("moe_act",)),
        (Machine((9, 0)), ("moe_act", "moe")),
        (ENGINE, ("moe_act", "moe")),  # in fp32
    ):
        config = configured().model_copy(update={"parallel": recomputing(*modules)})
        with pytest.raises(UserError) as caught:
            check_machine(config, {}, machine)
        assert caught.value.where == "config: parallel.recompute_modules"
        assert ("bfloat16" in caught.value.fix) is (machine is ENGINE)
        bf16 = config.model.model_copy(update={"dtype": "bfloat16"})
        check_machine(config.model_copy(update={"model": bf16}), {}, ENGINE)


def test_norms_that_are_parts_of_linear_layers_are_not_recomputed() -> None:
    """Those of dense models on a GPU. With LoRA they are layers of their own."""
    config = configured("model.dtype=bfloat16").model_copy(update={"parallel": recomputing("layernorm")})
    for machine in (Machine((9, 0)), ENGINE):
        with pytest.raises(UserError) as caught:
            check_machine(config, {}, machine)
        assert "recomputes nothing" in caught.value.what and caught.value.where == "config: parallel.recompute_modules"
    check_machine(config, {"num_experts": 4}, ENGINE)
    check_machine(config, {}, Machine())
    adapted = configured("model.dtype=bfloat16", "model.lora.rank=4")
    check_machine(adapted.model_copy(update={"parallel": recomputing("layernorm")}), {}, ENGINE)


@pytest.mark.parametrize(
    ("hf_config", "module", "instead"), [({}, "moe", "mlp"), ({}, "moe_act", "mlp"), ({"num_experts": 4}, "mlp", "moe")]
)
def test_a_module_that_the_model_does_not_have(hf_config: dict[str, Any], module: str, instead: str) -> None:
    with pytest.raises(UserError, match=f"'{module}'") as caught:
        check_recompute(hf_config, recomputing("core_attn", module))
    assert f'"{instead}"' in caught.value.fix
    check_recompute(hf_config, recomputing(instead))
    check_recompute(hf_config, ParallelConfig(recompute_modules=(module,)))  # type: ignore[arg-type]  # nothing is recomputed


def test_the_optimizer_is_torchs_without_transformer_engine_and_apex() -> None:
    assert optimizer_implementation() == "torch"


@given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 60))
def test_rectangles_cover_the_range(columns: int, start: int, length: int) -> None:
    """In order, without overlap, at most three."""
    found = list(rectangles(start, start + length, columns))
    cells = [
        (row + y) * columns + column + x
        for row, column, rows, width in found
        for y in range(rows)
        for x in range(width)
    ]
    assert cells == list(range(start, start + length))
    assert len(found) <= 3


def test_loaded_pieces_are_put_back_in_order() -> None:
    """In any order of loading; a rank without a range has no pieces."""
    whole, nothing = torch.zeros(7), torch.zeros(0)
    put_back(whole, {1: torch.tensor([[3.0, 4.0], [5.0, 6.0]]), 0: torch.tensor([[0.0, 1.0, 2.0]])})
    put_back(nothing, {})
    assert whole.tolist() == list(range(7))


def test_the_doc_lists_every_option() -> None:
    table = DOC.read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([a-z0-9_]+)`", table, re.MULTILINE))
    refused = {"overlap_param_gather", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "cuda_graph_impl"}
    refused |= {"tp_comm_overlap", "fp8_param", "gradient_accumulation_fusion", "defer_embedding_wgrad_compute"}
    assert refused <= {key.partition(".")[2] for key in REFUSED}
    allowed = {"use_distributed_optimizer", "overlap_grad_reduce"}
    assert refused | allowed <= rows <= refused | set(ParallelConfig.model_fields)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_keys_and_values_end_in_their_reason(name: str) -> None:
    key, _, value = name.partition("=")
    with pytest.raises(UserError) as caught:
        configured(f"{key}={value or 'true'}")
    reason, instead = REFUSED[name]
    assert key in caught.value.what and reason in caught.value.what and caught.value.fix == instead
    assert "\n" not in str(caught.value)
