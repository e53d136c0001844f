"""Compare the planner's predictions, with its default constants, to published throughputs.

    python tools/bench/planner.py --json run/bench/planner.json     seconds

Sources, read on 2026-11-22:

- NeMo RL: docs/about/performance-summary.md of NVIDIA-NeMo/RL, v0.4, GRPO on DGX H100, on-policy, bf16. The layout of
  Llama 3.1 8B is garbled there and comes from its recipe. Besides rollout, gradient and refit, a NeMo RL step has one
  forward pass for the policy's log-probs and one for the reference's. A prompt is assumed to be 128 tokens of the mean
  sequence.
- Megatron-Bridge: docs/performance-summary-archive.md of NVIDIA-NeMo/Megatron-Bridge, pre-training throughput with
  experts balanced by force. Our prediction covers gradient and optimizer of the same tokens, without norms.

A GB200's NVLink domain has the 72 GPUs of its rack. Layouts that split layers unequally (Qwen3-235B-A22B, Llama 3.1
405B) and asynchronous runs are not comparable and are omitted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from record import publish

from oblr_megatron.config import Config, parse_config
from oblr_megatron.model.published import published
from oblr_megatron.observe.performance.hardware import device_named
from oblr_megatron.planner.constants import Machine
from oblr_megatron.planner.cost import predict
from oblr_megatron.planner.setting import Setting
from oblr_megatron.planner.training_cost import log_prob_phase, training_phases


@dataclass(frozen=True, slots=True)
class Row:
    """One published measurement.

    Example: Row(source="NeMo RL 0.4", model="Qwen3-32B", devices="32 h100", figure="step s", published=393.0,
                 predicted=310.0, ratio=0.79, used="no")
    """

    source: str
    model: str
    devices: str
    figure: str
    published: float
    predicted: float
    ratio: float  # predicted over published
    used: str  # the default constant that was chosen from this row, or "no"


LLAMA3 = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
LLAMA3_8B = LLAMA3 | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA3_8B |= {"num_attention_heads": 32}
LLAMA3_70B = LLAMA3 | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
LLAMA3_70B |= {"num_attention_heads": 64}


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, print the table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    publish([*steps(), *pretraining()], "planner", options.json)


def steps() -> list[Row]:
    """Rows of NeMo RL's step times."""
    cases = [
        ("Llama 3.1 8B", LLAMA3_8B, 16, {"pipeline": 2, "recompute": 1}, 1, 1060, 97.7),
        ("Qwen3-32B", published("Qwen3-32B"), 32, {"tensor": 4, "pipeline": 4}, 4, 3206, 393.0),
        ("Qwen3-30B-A3B", published("Qwen3-30B-A3B"), 32, {"tensor": 2, "expert": 8}, 4, 3154, 225.0),
    ]
    rows = []
    for model, hf, gpus, sizes, width, tokens, seconds in cases:
        config = run_config(gpus, 64, 32, 128, 4096, sizes, rollout={"tensor_parallel_size": width})
        setting = Setting(hf, config, gpus, Machine(device_named("h100")), 128, tokens - 128)
        found = predict(setting).seconds + 2 * log_prob_phase(setting).seconds
        rows.append(Row("NeMo RL 0.4", model, f"{gpus} h100", "step s", seconds, found, found / seconds, "no"))
    return rows


def pretraining() -> list[Row]:
    """Rows of Megatron-Bridge's tokens per second and GPU."""
    qwen, deep = published("Qwen3-30B-A3B"), {"tensor": 4, "pipeline": 8, "chunks": 5}
    half = {"pipeline": 2, "chunks": 12, "expert": 8}
    cases: list[tuple[str, dict[str, Any], str, int, dict[str, int], int, int, int, float, str]] = [
        ("Llama 3 8B, fp8", LLAMA3_8B, "h100", 8, {}, 128, 8192, 1, 14451.0, "no"),
        ("Llama 3 70B, fp8", LLAMA3_70B, "h100", 64, deep, 256, 8192, 1, 1621.0, "no"),
        ("Qwen3-30B-A3B, fp8", qwen, "h100", 16, half, 1024, 4096, 1, 5113.0, "no"),
        ("Qwen3-30B-A3B, fp8", qwen, "b200", 8, {"expert": 8}, 512, 4096, 1, 9691.0, "mixture_s"),
        ("Qwen3-30B-A3B, fp8", qwen, "gb200", 8, {"expert": 8}, 512, 4096, 4, 26084.0, "no"),
    ]
    rows = []
    for model, hf, gpu, gpus, sizes, batch, length, rows_each, figure, used in cases:
        config = run_config(gpus, batch, 1, 16, length, sizes, rows=rows_each, model={"fp8": "hybrid"})
        device = device_named(gpu)
        device = replace(device, gpus_per_node=72) if gpu == "gb200" else device
        setting = Setting(hf, config, gpus, Machine(device))
        phases = training_phases(setting)
        found = setting.tokens / (phases["gradient"].seconds + phases["optimizer"].seconds) / gpus
        where = f"{gpus} {gpu}"
        rows.append(Row("Megatron-Bridge", model, where, "tokens/s/GPU", figure, found, found / figure, used))
    return rows


def run_config(
    gpus: int,
    prompts: int,
    group: int,
    prompt: int,
    length: int,
    sizes: dict[str, int],
    *,
    rows: int = 1,
    **sections: dict[str, Any],
) -> Config:
    """Config of a run without norms, by default with one sequence per microbatch."""
    tensor = sizes.get("tensor", 1)
    replicas = gpus // (tensor * sizes.get("pipeline", 1))
    folds = replicas // max(1, sizes.get("expert", 1) // tensor)  # one per group of replicas that share experts
    parallel = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": sizes.get("pipeline", 1),
        "virtual_pipeline_model_parallel_size": sizes.get("chunks"),
        "expert_model_parallel_size": sizes.get("expert", 1),
        "expert_tensor_parallel_size": 1 if "expert" in sizes else None,
        "sequence_parallel": tensor > 1,
        "micro_batch_tokens": rows * length,
        "recompute_granularity": "full" if "recompute" in sizes else "none",
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
    }
    return parse_config(
        {
            "run_dir": "unused",
            "num_prompts": prompts,
            "group_size": group,
            "model": {"path": "unused", "dtype": "bfloat16", **sections.get("model", {})},
            "data": {"train": "unused", "max_prompt_tokens": prompt},
            "rollout": {
                "max_response_tokens": length - prompt,
                "gpu_memory_utilization": 0.6,
                **sections.get("rollout", {}),
            },
            "algo": {"baseline": "none", "snr": {"num_folds": folds, "estimator": "momentum"}},
            "parallel": {name: value for name, value in parallel.items() if value is not None},
        }
    )


if __name__ == "__main__":
    main()
