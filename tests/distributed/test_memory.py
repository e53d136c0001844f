"""The estimated memory of a step on its fullest rank, in parallel layouts, equals the tensors alive there.

Tensor, sequence, pipeline (also interleaved), context and expert parallelism; tied embeddings at both ends of the
pipeline; responses of a prompt dealt to two replicas; recomputation; the distributed optimizer. Not covered: experts
with more tokens than others (the estimate deals tokens evenly), Transformer Engine's layers, GPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedConfig

from oblr_megatron.memory.training import estimate
from oblr_megatron.model.parallel import initialize, shutdown
from tests.distributed.launch import run_ranks
from tests.live import peak_of_step, step_config
from tests.tiny import tiny_config, tiny_moe_config

TOKENS = 96
SIZES = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32, "vocab_size": 128}

Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Parallel section, gradnorm section with algo.snr.estimator, sizes of the model."""


def layout(**sizes: int) -> dict[str, Any]:
    """Short names: tp, pp, vp, cp, ep, etp, sp."""
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vp": "virtual_pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    }
    found: dict[str, Any] = {names[name]: size for name, size in sizes.items() if name != "sp"}
    return found | {"sequence_parallel": bool(sizes.get("sp", 0))}


def model(sizes: dict[str, Any]) -> PreTrainedConfig:
    if sizes.get("num_experts"):
        return tiny_moe_config(**SIZES | {"moe_intermediate_size": 96} | sizes)
    return tiny_config(**SIZES | sizes)


def step(case: Case) -> Any:
    """The run's configuration."""
    parallel, gradnorm, _ = case
    estimator = gradnorm.get("estimator", "folds")
    gradnorm = {key: value for key, value in gradnorm.items() if key != "estimator"}
    cut = max(parallel.get(f"{name}_parallel_size", 1) for name in ("tensor_model", "pipeline_model", "context"))
    experts = parallel.get("expert_model_parallel_size", 1)
    prompts = 2 if cut == 1 or experts > 1 else 1
    folds = 1 if cut == 1 and experts > 1 else prompts  # a prompt a replica; replicas that share experts share a fold
    baseline = "pooled" if gradnorm["mode"] == "inline" else "optimal"
    algo = {"baseline": baseline, "snr": {"num_folds": folds, "estimator": estimator}}
    return step_config(TOKENS, prompts=prompts, gradnorm=gradnorm, parallel=parallel, algo=algo)


def peaks(cases: list[Case]) -> list[int]:
    """The peaks of this rank, case by case."""
    found = []
    for case in cases:
        config = step(case)
        parallel = initialize(config.parallel)
        found.append(peak_of_step(model(case[2]), config, parallel))
        shutdown(keep_process_group=True)
    return found


FULL = {"recompute_granularity": "full"}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
SHARDED = {"use_distributed_optimizer": True}
MODES = ("two_pass", "stash", "bookkeep", "inline")
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp": (layout(tp=2), {}),
    "tp, sp": (layout(tp=2, sp=1), {}),
    "pp": (layout(pp=2), {"num_hidden_layers": 4}),
    "pp, vp": (layout(pp=2, vp=2), {"num_hidden_layers": 4}),
    "pp, tied": (layout(pp=2), {"tie_word_embeddings": True, "vocab_size": 1024}),
    "cp": (layout(cp=2), {}),
}
EXPERTS: dict[str, Case] = {
    "ep, sp": (layout(tp=2, sp=1, ep=2, etp=1), {"mode": "two_pass"}, {"num_experts": 4}),
    "etp, sp": (layout(tp=2, sp=1), {"mode": "bookkeep"}, {"num_experts": 4}),
    "stash": ({}, {"mode": "stash"}, {}),
}
WIDE = {"vocab_size": 1024}
RECOMPUTED: dict[str, Case] = {
    "tp, whole layers": (layout(tp=2, sp=1) | FULL, {"mode": "two_pass"}, {"num_hidden_layers": 4}),
    "pp, whole layers": (layout(pp=2) | FULL, {"mode": "two_pass"}, {"num_hidden_layers": 4}),
    "tp, mlp": (layout(tp=2, sp=1) | MLP, {"mode": "two_pass"}, {"num_hidden_layers": 4}),
}
DEALT: dict[str, Case] = {
    "replicas": (SHARDED, {"mode": "two_pass"}, WIDE),
    "average of gradients": (SHARDED, {"mode": "two_pass", "estimator": "momentum"}, WIDE),
    "cp": (layout(cp=2) | SHARDED, {"mode": "two_pass"}, WIDE),
    "experts": (layout(ep=2, etp=1) | SHARDED, {"mode": "two_pass"}, {"num_experts": 4}),
}


@pytest.mark.parametrize("nightly", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("mode", MODES)
def test_fullest_rank_of_two(mode: str, nightly: bool) -> None:
    """Each mode has every second layout, in turn; the nightly test has all."""
    chosen = list(LAYOUTS)[0 if nightly else MODES.index(mode) % 2 :: 2 - nightly]
    compare({name: (LAYOUTS[name][0], {"mode": mode}, LAYOUTS[name][1]) for name in chosen})


def test_experts_and_replicas() -> None:
    compare(EXPERTS)


def test_activations_made_again() -> None:
    compare(RECOMPUTED)


def test_optimizer_state_dealt_to_replicas() -> None:
    compare(DEALT)


def compare(cases: dict[str, Case]) -> None:
    """Run every case on two ranks; the estimate is within 5% of the fullest rank."""
    measured = run_ranks(peaks, 2, list(cases.values()))
    found = {}
    for (name, case), *of_ranks in zip(cases.items(), *measured, strict=True):
        estimated = estimate(model(case[2]).to_dict(), step(case), 2, fixed_bytes=0)
        found[name] = estimated.total / max(of_ranks)
    assert found == pytest.approx(dict.fromkeys(found, 1.0), rel=0.05)
