"""After a push from megatron-core, vLLM's samples have megatron-core's own log-probs.

One engine, four gloo ranks, fp32. The weights are pushed from each layout in turn, gathered over tensor and pipeline
parallelism, tied and untied. Unchanged weights from another layout give the same samples to the last bit; changed
weights give others. Every push is read back and compared (weights.verify).

Not covered: experts (test_moe.py); bf16; the gather's memory (tests/distributed/test_export.py).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.config import WeightsConfig
from oblr_megatron.data.packing import one_per_microbatch
from oblr_megatron.families import MATRICES
from oblr_megatron.model.lora.adapters import is_adapter
from oblr_megatron.model.policy import Policy
from oblr_megatron.model.step import run_schedule
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.types import MicroBatch, Sample
from oblr_megatron.weights.adapter import AdapterShape, AdapterWeights
from oblr_megatron.weights.export import MegatronWeights
from oblr_megatron.weights.export_adapter import MegatronAdapter
from tests.distributed.adapters import LORA, SCALE, fill
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import load_policy
from tests.e2e.forked_processes import fork_keeper
from tests.e2e.tiny_rollout import make_config, sample
from tests.tiny import make_hf_dir

LAYOUTS: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2})
PARITY = 2e-5  # 6e-6 seen, rounding of fp32
CHANGE = 1.2  # of every weight


HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # vLLM's kernels take heads of 32
MODELS: dict[str, dict[str, Any]] = {
    "untied": {"head_dim": 32},
    "tied": {"tied": True, "head_dim": 32},
    "qwen2": {"family": "qwen2"} | HEADS,
    "llama": {"family": "llama", "head_dim": 32},
}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("untied", marks=pytest.mark.nightly),
        "tied",
        pytest.param("qwen2", marks=pytest.mark.nightly),
        pytest.param("llama", marks=pytest.mark.nightly),
    ],
)
def test_logprobs_of_pushed_weights_are_the_trainers(model: str, tmp_path: Path) -> None:
    path = make_hf_dir(tmp_path / "model", **MODELS[model])
    ranks = run_ranks(push_from_all_layouts, 4, path, tmp_path / "run", first=fork_keeper)
    for cases in zip(*ranks, strict=True):
        name = cases[0]["layout"]
        assert 0 < max(case["error"] for case in cases) < PARITY, name
        assert max(case["error_before"] for case in cases) > 1000 * PARITY, "the change is large enough to be seen"
        assert cases[0]["before"] != cases[0]["after"], name
    for one, other in pairwise(ranks[0]):
        assert one["before"] == other["before"] and one["after"] == other["after"], other["layout"]


def push_from_all_layouts(path: Path, run_dir: Path) -> list[dict[str, Any]]:
    """For each layout: samples of unchanged and of changed weights, and the largest log-prob error of each."""
    results = []
    engines = None
    for sizes in LAYOUTS:
        with layout(**sizes) as parallel:
            if engines is None:
                config = make_config(path, run_dir).model_copy(update={"weights": WeightsConfig(verify=True)})
                engines = ColocatedEngines(config, parallel)
            policy = load_policy(path, parallel, dtype="float32")
            engines.push(MegatronWeights(policy), 2 * len(results))
            before = sample(engines, count=6)
            with torch.no_grad():
                for _, parameter in policy.named_parameters():
                    parameter.mul_(CHANGE)
            engines.push(MegatronWeights(policy), 2 * len(results) + 1)
            after = sample(engines, count=6)
            results.append(
                {
                    "layout": str(sizes),
                    "before": drawn(before),
                    "after": drawn(after),
                    "error_before": largest_error(policy, before),
                    "error": largest_error(policy, after),
                }
            )
    assert engines is not None
    dist.barrier()
    engines.close()
    return results


@pytest.mark.nightly
def test_logprobs_of_pushed_adapters_are_the_trainers(tmp_path: Path) -> None:
    path = make_hf_dir(tmp_path / "model", **MODELS["tied"])
    ranks = run_ranks(push_adapters_from_all_layouts, 4, path, tmp_path / "run", first=fork_keeper)
    for cases in zip(*ranks, strict=True):
        for error in ("error_before", "error"):
            assert 0 < max(case[error] for case in cases) < PARITY, cases[0]["layout"]
        assert cases[0]["before"] != cases[0]["after"], cases[0]["layout"]
    for one, other in pairwise(ranks[0]):
        assert one["before"] == other["before"] and one["after"] == other["after"], other["layout"]


def push_adapters_from_all_layouts(path: Path, run_dir: Path) -> list[dict[str, Any]]:
    """As `push_from_all_layouts`, of adapters alone into the engine's slot."""
    results: list[dict[str, Any]] = []
    shape, engines = AdapterShape(LORA["rank"], MATRICES), None
    for sizes in LAYOUTS:
        with layout(**sizes) as parallel:
            if engines is None:
                config = make_config(path, run_dir).model_copy(update={"weights": WeightsConfig(verify=True)})
                engines = ColocatedEngines(config, parallel, lora=shape)
            policy = load_policy(path, parallel, dtype="float32", lora=LORA)
            fill(policy)
            source = AdapterWeights(MegatronAdapter(policy, shape), MegatronWeights(policy, merged=False), SCALE)
            stats = engines.push(source, 2 * len(results))
            before = sample(engines, count=6)
            error = largest_error(policy, before)
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    parameter.mul_(CHANGE if is_adapter(name) else 1)
            alone = engines.push(source, 2 * len(results) + 1)
            assert alone.bytes < stats.bytes if not results else alone.bytes == stats.bytes
            after = sample(engines, count=6)
            results.append(
                {
                    "layout": str(sizes),
                    "before": drawn(before),
                    "after": drawn(after),
                    "error_before": error,
                    "error": largest_error(policy, after),
                }
            )
    assert engines is not None
    dist.barrier()
    engines.close()
    return results


def drawn(samples: list[Sample]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Token ids and log-probs, without the version."""
    return [(one.response_ids, one.logprobs) for one in samples]


def largest_error(policy: Policy, samples: list[Sample]) -> float:
    """max |engine's log-prob - trainer's log-prob| on the last stage; 0 on the others."""

    def error(hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = policy.head(hidden, batch).logprobs
        assert batch.mask.any()
        return hidden.sum(), {"error": (logprobs - batch.rollout_logprobs)[batch.mask].abs().max()}

    batches = one_per_microbatch(samples, range(len(samples)))
    return max((one["error"].item() for one in run_schedule(policy, batches, error, forward_only=True)), default=0.0)
