"""Megatron's options: which are refused and with what reason, before anything starts; which reach megatron-core.

What the allowed ones do is in tests/distributed (test_distributed_optimizer.py, test_overlap.py, test_recompute.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oblr_megatron.algo.snr_estimators import ESTIMATORS
from oblr_megatron.checks.layout import check_recompute
from oblr_megatron.checks.machine import Machine, check_machine
from oblr_megatron.config import Config, ParallelConfig, parse_config
from oblr_megatron.config.parallel_checks import TOTAL_ALONE, UNUSABLE
from oblr_megatron.errors import UserError
from oblr_megatron.model.optimizer import optimizer_implementation
from oblr_megatron.model.shards import put_back, rectangles
from oblr_megatron.model.transformer_config import _recompute, _schedule
from oblr_megatron.types import GradientStats

ENGINE = Machine((9, 0), "13.0", "2.11.0")
NORMLESS = ("algo.baseline=rloo", "algo.snr.estimator=momentum")
FUSED = "parallel.gradient_accumulation_fusion=true"
DEFERRED = "parallel.defer_embedding_wgrad_compute=true"
DOC = Path(__file__).parents[3] / "docs" / "parallel.md"


def configured(*overrides: str) -> Config:
    table = {"run_dir": "r", "num_steps": 1, "model": {"path": "m"}, "data": {"train": "d.jsonl"}}
    return parse_config(table, overrides=list(overrides))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("optimizer.name=sgd", "parallel.use_distributed_optimizer=true"), "megatron-core shards Adam alone"),
        (("model.dtype=float64", "parallel.use_distributed_optimizer=true"), "model.dtype 'float64'"),
        (("parallel.overlap_grad_reduce=true",), "which algo.baseline 'optimal_prior' asks for"),
        (("parallel.overlap_grad_reduce=true", *NORMLESS, "gradnorm.always=true"), "which gradnorm.always asks for"),
        (("parallel.overlap_grad_reduce=true", "algo.baseline=rloo"), "algo.snr.estimator 'folds'"),
        (("parallel.overlap_grad_reduce=true", "algo.baseline=rloo", "algo.snr.estimator=prompts"), "'prompts'"),
        (("parallel.overlap_grad_reduce=true", "algo.baseline=rloo", "algo.snr.estimator=plugin"), "'plugin'"),
        (("parallel.overlap_param_gather=true", *NORMLESS), "sends the weights to the engines as soon as"),
        ((FUSED,), "gradient_accumulation_fusion makes weight gradients where no norm"),
        ((DEFERRED, FUSED), "no norm of a response's own can be taken"),
        ((DEFERRED, *NORMLESS), "needs gradient_accumulation_fusion = true, pipeline_model_parallel_size of 2 or more"),
        (
            (
                DEFERRED,
                FUSED,
                "parallel.overlap_grad_reduce=true",
                "parallel.pipeline_model_parallel_size=2",
                *NORMLESS,
            ),
            "defer_embedding_wgrad_compute needs overlap_grad_reduce = false",
        ),
        (("parallel.overlap_moe_expert_parallel_comm=true", *NORMLESS), "cuts a forward into pieces"),
        (("parallel.delay_wgrad_compute=true", *NORMLESS), "goes with overlap_moe_expert_parallel_comm"),
        (("parallel.cuda_graph_impl=local", *NORMLESS), "a graph replays one shape"),
        (("parallel.cuda_graph_impl=transformer_engine",), "a graph replays one shape"),
        (
            (
                "parallel.recompute_granularity=selective",
                'parallel.recompute_modules=["layernorm"]',
                "model.fp8=hybrid",
                "model.fp8_recipe=delayed",
                "model.dtype=bfloat16",
            ),
            "parallel.recompute_modules 'layernorm' with model.fp8_recipe 'delayed'",
        ),
    ],
)
def test_refused_with_the_reason_and_a_remedy(overrides: tuple[str, ...], said: str) -> None:
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
        (FUSED, "algo.baseline=rloo"),
        (FUSED, DEFERRED, "parallel.pipeline_model_parallel_size=2", "algo.baseline=group_mean"),
        ("parallel.recompute_granularity=selective", 'parallel.recompute_modules=["layernorm","mlp","core_attn"]'),
    ],
)
def test_allowed(overrides: tuple[str, ...]) -> None:
    configured(*overrides)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_an_estimator_is_allowed_where_it_works_without_the_folds_norms(name: str) -> None:
    """With overlap they are not known; "samples" wants the samples' norms, which overlap does not have either."""
    stats = GradientStats(0.0, 1.0, float("nan"), 4, 0.0, 0.0, 0.0, 1, momentum_dot=0.25)
    assert ESTIMATORS[name](stats, 8).defined == (name in TOTAL_ALONE)


def test_options_reach_megatron_core() -> None:
    """Under its own names; where a GPU or a package is missing, that is said."""
    off = _schedule(ParallelConfig())
    assert not any(value for name, value in off.items() if name != "cuda_graph_impl")
    assert off["cuda_graph_impl"] == "none"
    assert _schedule(ParallelConfig(defer_embedding_wgrad_compute=True))["defer_embedding_wgrad_compute"]


def test_missing_kernels_are_found_before_ranks_are_started() -> None:
    fused = configured(FUSED, *NORMLESS)
    for machine in (Machine(), Machine((9, 0)), Machine(transformer_engine="2.11.0")):
        with pytest.raises(UserError, match="needs a GPU, and Transformer Engine or apex"):
            check_machine(fused, {}, machine)
    for machine in (ENGINE, Machine((9, 0), apex_gradients=True)):
        check_machine(fused, {}, machine)


def recomputing(*modules: str) -> ParallelConfig:
    return ParallelConfig.model_validate({"recompute_granularity": "selective", "recompute_modules": modules})


def test_recomputed_modules_reach_megatron_core() -> None:
    found = _recompute(recomputing("mlp", "layernorm"))
    assert found == {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}
    for machine, modules in (
        (Machine(), ("moe_act",)),
        (Machine((9, 0)), ("layernorm",)),
        (Machine((9, 0)), ("moe_act", "moe")),
    ):
        config = configured().model_copy(update={"parallel": recomputing(*modules)})
        with pytest.raises(UserError, match="needs Transformer Engine's layers"):
            check_machine(config, {}, machine)
        check_machine(config, {}, ENGINE)


@pytest.mark.parametrize(
    ("hf_config", "module", "instead"),
    [({}, "moe", "mlp"), ({}, "moe_act", "mlp"), ({"num_experts": 4}, "mlp", "moe")],
)
def test_a_module_that_the_model_has_not(hf_config: dict[str, Any], module: str, instead: str) -> None:
    with pytest.raises(UserError, match=f"'{module}' in a model") as caught:
        check_recompute(hf_config, recomputing("core_attn", module))
    assert f'"{instead}"' in caught.value.fix
    check_recompute(hf_config, recomputing(instead))
    check_recompute(hf_config, ParallelConfig(recompute_modules=(module,)))  # type: ignore[arg-type]  # nothing is recomputed


def test_whose_kernels_update_the_weights() -> None:
    """Neither Transformer Engine nor apex is among the CPU stack."""
    assert optimizer_implementation() == "torch"


@given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 60))
def test_rectangles_are_the_stretch(columns: int, start: int, length: int) -> None:
    """In order, without overlap, and not more than three."""
    found = list(rectangles(start, start + length, columns))
    cells = [
        (row + y) * columns + column + x
        for row, column, rows, width in found
        for y in range(rows)
        for x in range(width)
    ]
    assert cells == list(range(start, start + length))
    assert len(found) <= 3


def test_loaded_pieces_are_put_back_in_their_order() -> None:
    """Whatever megatron-core loaded them into; a rank without a stretch has none."""
    whole, nothing = torch.zeros(7), torch.zeros(0)
    put_back(whole, {1: torch.tensor([[3.0, 4.0], [5.0, 6.0]]), 0: torch.tensor([[0.0, 1.0, 2.0]])})
    put_back(nothing, {})
    assert whole.tolist() == list(range(7))


def test_the_table_names_every_option() -> None:
    table = DOC.read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([a-z_]+)`", table, re.MULTILINE))
    options = {*UNUSABLE, "cuda_graph_impl", "use_distributed_optimizer", "overlap_grad_reduce"}
    assert options | {"gradient_accumulation_fusion", "defer_embedding_wgrad_compute"} <= rows
    assert rows <= set(ParallelConfig.model_fields)
