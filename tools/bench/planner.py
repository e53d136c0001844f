"""Compare the planner's predictions, with its default constants, to published throughputs.

    python tools/bench/planner.py --json run/bench/planner.json     half a minute

Sources, read on 2026-11-22:

- NeMo RL: docs/about/performance-summary.md of NVIDIA-NeMo/RL, v0.5 and v0.6, GRPO on DGX H100, on-policy, bf16.
  Besides rollout, gradient and refit, a NeMo RL step has one forward pass for the policy's log-probs and one for the
  reference's. A prompt is assumed to be 128 tokens of the mean sequence.
- Megatron-Bridge: docs/performance-summary.md of NVIDIA-NeMo/Megatron-Bridge and its archive, pre-training throughput
  with experts balanced by force. Our prediction covers gradient and optimizer of the same tokens, without norms.
- Pai-Megatron-Patch, issue 643: a user's figure, pre-training in bf16. Batch size and dispatcher are assumed.

Rows of the dispatcher "hybrid" are from releases with HybridEP, which launches experts without waiting for counts and
sends a token to each node once. They are predicted with HYBRID instead of the default constants. Ours is the plain one.

The column `left_out` is the prediction with constants that were fitted to all rows but this one, over the published
figure. The fit starts from the defaults and holds them with a prior (SPREAD), because rows are few.

A GB200's NVLink domain has the 72 GPUs of its rack. Omitted: layouts that split layers unequally (Qwen3-235B-A22B),
asynchronous runs, and systems with another trainer or an unknown layout.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from record import publish
from scipy.optimize import least_squares

from oblr_megatron.config import Config, parse_config
from oblr_megatron.model.published import published
from oblr_megatron.observe.performance.hardware import device_named
from oblr_megatron.planner.constants import DEFAULT, Constants, Machine
from oblr_megatron.planner.cost import predict
from oblr_megatron.planner.setting import Setting
from oblr_megatron.planner.training_cost import log_prob_phase, training_phases

HYBRID = {"mixture_s": 0.9e-3, "node_copies": 0.25}
"""A dispatcher that does not wait for counts (set from the row marked "mixture_s") and sends a token to each node once.
With 8 of 128 experts on two nodes, nearly every token goes to both: once instead of 4 times."""
FITTED = ("product", "product_fp8", "attention", "memory", "link", "mixture_s", "decode", "decode_step_s")
SPREAD = log(1.5)
"""Standard deviation of the prior of each constant's logarithm; that of a row is NOISE."""
NOISE = log(1.1)


@dataclass(frozen=True, slots=True)
class Case:
    """A published measurement and the run that it is compared with."""

    source: str
    model: str
    hf: dict[str, Any]
    gpu: str
    gpus: int
    sizes: dict[str, int]
    figure: float  # seconds of a step with `width`, else tokens/s/GPU
    length: int  # longest sequence; with `width` the mean one
    batch: int = 0  # sequences of a pre-training step
    width: int = 0  # tensor parallelism of the engines of an RL step
    rows: int = 1  # sequences of a microbatch
    fp8: bool = False
    dispatcher: str = "plain"
    used: str = "no"

    @property
    def is_step(self) -> bool:
        """Whether the figure is an RL step's seconds."""
        return self.width > 0

    def predicted(self, constants: Constants) -> float:
        """The planner's figure."""
        device = device_named(self.gpu)
        device = replace(device, gpus_per_node=72) if self.gpu == "gb200" else device
        if self.dispatcher == "hybrid":
            scale = constants.mixture_s / DEFAULT.mixture_s
            hybrid = HYBRID | {"mixture_s": HYBRID["mixture_s"] * scale}
            constants = replace(constants, **hybrid)
        machine = Machine(device, constants)
        if self.is_step:
            rollout = {"tensor_parallel_size": self.width}
            config = run_config(self.gpus, 64, 32, 128, 4096, self.sizes, rollout=rollout)
            setting = Setting(self.hf, config, self.gpus, machine, 128, self.length - 128)
            return predict(setting).seconds + 2 * log_prob_phase(setting).seconds
        model = {"fp8": "hybrid"} if self.fp8 else {}
        config = run_config(self.gpus, self.batch, 1, 16, self.length, self.sizes, rows=self.rows, model=model)
        setting = Setting(self.hf, config, self.gpus, machine)
        phases = training_phases(setting)
        return setting.tokens / (phases["gradient"].seconds + phases["optimizer"].seconds) / self.gpus


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Example: Row(source="NeMo RL 0.5", model="Qwen3-32B", devices="32 h100", dispatcher="plain", figure="step s",
                 published=376.0, predicted=317.0, ratio=0.84, left_out=0.88, used="no")
    """

    source: str
    model: str
    devices: str
    dispatcher: str
    figure: str
    published: float
    predicted: float
    ratio: float  # predicted over published
    left_out: float  # the same with constants that were fitted to the other rows
    used: str  # the constant that was chosen from this row, or "no"


LLAMA3 = {
    "model_type": "llama",
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
    rows = compared(cases())
    publish(rows, "planner", options.json)
    for name in ("ratio", "left_out"):
        errors = [abs(log(getattr(row, name))) for row in rows]
        print(f"{name}: median factor {exp(median(errors)):.2f}, largest {exp(max(errors)):.2f}")


def cases() -> list[Case]:
    """All rows; the layouts are those of the sources."""
    moe, large, h100 = published("Qwen3-30B-A3B"), published("Qwen3-32B"), "h100"
    name, name8, bridge = "Qwen3-30B-A3B", "Qwen3-30B-A3B, fp8", "Megatron-Bridge"
    half, deep = {"pipeline": 2, "chunks": 12, "expert": 8}, {"tensor": 4, "pipeline": 8, "chunks": 5}
    steps = [
        Case("NeMo RL 0.5", "Llama 3.1 8B", LLAMA3_8B, h100, 16, {"pipeline": 2, "recompute": 1}, 92.8, 1019, width=1),
        Case("NeMo RL 0.5", "Qwen3-32B", large, h100, 32, {"tensor": 4, "pipeline": 4}, 376.0, 3251, width=4),
        Case("NeMo RL 0.5", name, moe, h100, 32, {"expert": 8}, 198.0, 3196, width=2),
        Case("NeMo RL 0.6", name, moe, h100, 32, {"expert": 8}, 192.0, 3203, width=2),
    ]
    fp8 = {"fp8": True}
    training = [
        Case(bridge, "Llama 3 8B, fp8", LLAMA3_8B, h100, 8, {}, 14451.0, 8192, 128, **fp8),
        Case(bridge, "Llama 3 70B, fp8", LLAMA3_70B, h100, 64, deep, 1621.0, 8192, 256, **fp8),
        Case(bridge, "Llama 3 70B, fp8", LLAMA3_70B, h100, 32, deep | {"pipeline": 4}, 1638.0, 8192, 128, **fp8),
        Case(bridge, name8, moe, "b200", 8, {"expert": 8}, 9691.0, 4096, 512, used="mixture_s", **fp8),
        Case(bridge, name8, moe, "gb200", 8, {"expert": 8}, 26084.0, 4096, 512, rows=4, **fp8),
        Case("Pai-Megatron", name, moe, "h800", 16, {"pipeline": 2, "expert": 8}, 6325.0, 8192, 256),
    ]
    newer = {"dispatcher": "hybrid", "fp8": True}
    hybrid = [
        Case(f"{bridge} 26.02.01", name8, moe, h100, 16, half, 9058.0, 4096, 1024, used="mixture_s", **newer),
        Case(f"{bridge} 26.04", name8, moe, h100, 16, {"expert": 16}, 8901.0, 4096, 1024, **newer),
        Case(f"{bridge} 26.06", name8, moe, h100, 16, {"expert": 16}, 8826.0, 4096, 1024, **newer),
    ]
    return [*steps, *training, *hybrid]


def compared(found: Sequence[Case]) -> list[Row]:
    """Each case with the default constants, and with those fitted to the others."""
    rows = []
    for case in found:
        own = case.predicted(DEFAULT)
        fitted = case.predicted(fit([other for other in found if other is not case]))
        rows.append(
            Row(
                source=case.source,
                model=case.model,
                devices=f"{case.gpus} {case.gpu}",
                dispatcher=case.dispatcher if "expert" in case.sizes else "",
                figure="step s" if case.is_step else "tokens/s/GPU",
                published=case.figure,
                predicted=own,
                ratio=own / case.figure,
                left_out=fitted / case.figure,
                used=case.used,
            )
        )
    return rows


def fit(found: Sequence[Case]) -> Constants:
    """The constants FITTED that explain some rows best, near the defaults."""

    def constants(logs: np.ndarray) -> Constants:
        factors = dict(zip(FITTED, np.exp(logs), strict=True))
        return replace(DEFAULT, **{name: getattr(DEFAULT, name) * float(factors[name]) for name in FITTED})

    def residuals(logs: np.ndarray) -> np.ndarray:
        own = constants(logs)
        rows = [log(case.predicted(own) / case.figure) / NOISE for case in found]
        return np.array([*rows, *(logs / SPREAD)])

    return constants(least_squares(residuals, np.zeros(len(FITTED))).x)


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
