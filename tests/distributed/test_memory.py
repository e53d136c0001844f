"""The estimated memory of a step on its fullest rank, in parallel layouts, against the tensors alive there.

Tensor, sequence, pipeline (also interleaved), context and expert parallelism; tied embeddings at both ends of the
pipeline; responses of a prompt dealt to two replicas. Not covered: experts that see more tokens than others (the
estimate deals tokens evenly), Transformer Engine's layers, GPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedConfig

from oblr_megatron.gradnorm.memory import estimate
from oblr_megatron.model.parallel import initialize, shutdown
from tests.distributed.launch import run_ranks
from tests.live import peak_of_step, step_config
from tests.tiny import tiny_config, tiny_moe_config

TOKENS = 96
SIZES = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32, "vocab_size": 128}

Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Parallel section, gradnorm section, sizes of the model."""


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
    prompts = 2 if gradnorm.get("stash_spread", 1) > 1 or parallel.get("expert_model_parallel_size", 1) > 1 else 1
    return step_config(TOKENS, prompts=prompts, gradnorm=gradnorm, parallel=parallel)


def peaks(cases: list[Case]) -> list[int]:
    """Of this rank, case by case."""
    found = []
    for case in cases:
        config = step(case)
        parallel = initialize(config.parallel)
        found.append(peak_of_step(model(case[2]), config, parallel))
        shutdown(keep_process_group=True)
    return found


MODES = ("two_pass", "stash", "bookkeep")
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
    "stash spread": ({}, {"mode": "stash", "stash_spread": 2}, {}),
}


@pytest.mark.parametrize("mode", MODES)
def test_fullest_rank_of_two(mode: str) -> None:
    cases = {name: (parallel, {"mode": mode}, sizes) for name, (parallel, sizes) in LAYOUTS.items()}
    compare(cases)


def test_experts_and_replicas_that_share_prompts() -> None:
    compare(EXPERTS)


def compare(cases: dict[str, Case]) -> None:
    """Every case on two ranks; the fullest is what was estimated, within a twentieth."""
    measured = run_ranks(peaks, 2, list(cases.values()))
    found = {}
    for (name, case), *of_ranks in zip(cases.items(), *measured, strict=True):
        estimated = estimate(model(case[2]).to_dict(), step(case), 2, fixed_bytes=0)
        found[name] = estimated.total / max(of_ranks)
    assert found == pytest.approx(dict.fromkeys(found, 1.0), rel=0.05)
