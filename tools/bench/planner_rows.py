"""Published steps and throughputs that tools/bench/planner.py compares with predictions, and those that it cannot.

Sources, read on 2026-11-22 and 2026-11-23:

- NeMo RL: docs/about/performance-summary.md of NVIDIA-NeMo/RL, v0.5 and v0.6, and its recipes for layouts; GRPO on DGX
  H100, bf16. A step has a forward pass for the policy's log-probs and one for the reference's. A prompt is assumed to
  be 128 tokens of the mean sequence. Steps off policy: engines on GPUs of their own; lengths of the on-policy row.
  The row "0.88" is pull request 3278: the row above with a gpu_memory_utilization of 0.88, from its tokens/s.
- Megatron-Bridge: docs/performance-summary.md of NVIDIA-NeMo/Megatron-Bridge and its archive, pre-training throughput
  with experts balanced by force. The prediction covers gradient and optimizer of the same tokens, without norms.
- Megatron-LM, pull request 5728: pre-training TFLOP/s of its recipes (layouts in their file names), as tokens/s/GPU.
- Pai-Megatron-Patch, issue 643: a user's figure, pre-training in bf16. Batch size and dispatcher are assumed.
- verl, docs/perf/dpsk.md: MFU of the update, as tokens/s/GPU. Length (4,096), batch, microbatch and recomputation are
  assumed.
- prime-rl: benchmarks of its trainer, FSDP with recomputation; ours is the distributed optimizer. Its batch is unknown,
  and 16k tokens take as long as 65k: these rows are shown and not fitted.
- silybench: derived/csv/perf_points.csv of tgarg01/silybench-data, `vllm bench serve` of vLLM 0.30, 24 September 2026.
  N clients send prompts of one length without pause. 396 and 40 are the most with a first token within 2 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oblr_megatron.model.published import published
from oblr_megatron.observe.performance.flops import training_flops
from oblr_megatron.observe.performance.hardware import device_named


@dataclass(frozen=True, slots=True)
class Case:
    """A published measurement and the run that it is compared with."""

    source: str
    model: str
    hf: dict[str, Any]
    gpu: str
    gpus: int  # of trainer and engines
    sizes: dict[str, int]
    figure: float  # seconds of a step with `width`, tokens/s that an engine samples with `users`, else tokens/s/GPU
    length: int  # longest sequence; with `width` the mean one
    batch: int = 0  # sequences of a pre-training step; prompts of an RL step; tokens of a prompt with `users`
    width: int = 0  # tensor parallelism of the engines of an RL step
    rows: int = 1  # sequences of a microbatch
    group: int = 32  # responses to a prompt
    longest: int = 4096  # longest sequence of an RL step
    engine_gpus: int = 0  # that only sample
    ahead: int = 1  # steps that the engines work on at once; k for k steps off policy
    users: int = 0  # sequences that an engine decodes at once
    utilization: float = 0.8  # of the memory of engines on GPUs of their own
    fp8: bool = False  # the trainer; with `width` the engines
    dispatcher: str = "plain"
    used: str = "no"  # the constant that was set from this row; NOT_FITTED: no fit has the row

    @property
    def is_step(self) -> bool:
        """Whether the figure is an RL step's seconds."""
        return self.width > 0

    @property
    def nodes_of_experts(self) -> int:
        """Nodes that a group of expert-parallel ranks covers; a GB200's links are assumed to reach its whole rack."""
        per_node = 72 if self.gpu == "gb200" else device_named(self.gpu).gpus_per_node
        return -(-self.sizes.get("expert", 1) // per_node)


@dataclass(frozen=True, slots=True)
class Left:
    """A published figure without a prediction. Example: Left("vime", "Qwen3-4B, 4 NPU", "178 s", "no data sheet")"""

    source: str
    what: str
    figure: str
    reason: str


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
OVERLAPPED = "hybrid, overlapped"
"""HybridEP, with the all-to-all of one microbatch behind the products of another."""
NOT_FITTED = "not fitted"


def cases() -> list[Case]:
    """All rows that have a prediction; the layouts are those of the sources."""
    return [*_steps(), *_training(), *_decoding()]


def _decoding() -> list[Case]:
    """Prompts of 128 or 2,048 tokens, of which `length` counts the response too."""
    figures = {
        (128, 1024): {1: 145.7, 16: 2116.8, 64: 6597.0, 256: 13566.9, 396: 13322.0},
        (2048, 2048): {1: 142.4, 16: 1625.1, 40: 2814.7, 64: 3462.8},
    }
    hf = published("Qwen3-8B")
    return [
        Case(
            "silybench", f"Qwen3-8B, {n} x {asked} / {given}", hf, "h100", 1, {}, figure, asked + given, asked, users=n
        )
        for (asked, given), row in figures.items()
        for n, figure in row.items()
    ]


def _steps() -> list[Case]:
    moe, large, vast, h100 = published("Qwen3-30B-A3B"), published("Qwen3-32B"), published("Qwen3-235B-A22B"), "h100"
    name, largest, five, six = "Qwen3-30B-A3B", "Qwen3-235B-A22B", "NeMo RL 0.5", "NeMo RL 0.6"
    small = {"pipeline": 2, "recompute": 1}
    deep = {"tensor": 2, "context": 2, "pipeline": 8, "short": 1, "expert": 16, "recompute": 1}
    long: dict[str, Any] = {"batch": 16, "longest": 8192}
    apart = long | {"width": 8, "engine_gpus": 128}
    off: dict[str, Any] = {"engine_gpus": 8}
    eight_off: dict[str, Any] = {"engine_gpus": 64, "ahead": 8, "dispatcher": "hybrid"}
    return [
        Case(five, "Llama 3.1 8B", LLAMA3_8B, h100, 16, small, 92.8, 1019, 64, 1),
        Case(five, "Llama 3.1 8B, 1 off", LLAMA3_8B, h100, 16, small, 64.8, 1019, 64, 1, **off),
        Case(five, "Llama 3.1 8B, 1 off, fp8", LLAMA3_8B, h100, 16, small, 53.0, 1019, 64, 1, **off, fp8=True),
        Case(five, "Qwen3-32B", large, h100, 32, {"tensor": 4, "pipeline": 4}, 376.0, 3251, 64, 4),
        Case(five, name, moe, h100, 32, {"expert": 8}, 198.0, 3196, 64, 2),
        Case(six, name, moe, h100, 32, {"expert": 8}, 192.0, 3203, 64, 2),
        Case(six, f"{name}, 8 off", moe, h100, 192, {"expert": 8}, 34.5, 3203, 64, 2, **eight_off),
        Case(six, largest, vast, h100, 128, deep, 395.0, 5698, width=16, **long),
        Case(six, largest, vast, h100, 256, deep, 312.0, 5698, width=16, **long),
        Case(six, f"{largest}, 1 off", vast, h100, 256, deep, 231.0, 5698, **apart),
        Case(six, f"{largest}, 1 off, 0.88", vast, h100, 256, deep, 231 * 51.5 / 57.8, 5698, **apart, utilization=0.88),
    ]


def _training() -> list[Case]:
    moe, vast, h100, bridge = published("Qwen3-30B-A3B"), published("Qwen3-235B-A22B"), "h100", "Megatron-Bridge"
    name, name8, largest = "Qwen3-30B-A3B", "Qwen3-30B-A3B, fp8", "Qwen3-235B-A22B"
    half, deep = {"pipeline": 2, "chunks": 12, "expert": 8}, {"tensor": 4, "pipeline": 8, "chunks": 5}
    eight = {"tensor": 2, "pipeline": 8, "chunks": 4, "short": 1, "expert": 32}
    fp8: dict[str, Any] = {"fp8": True}
    newer: dict[str, Any] = {"dispatcher": "hybrid"}
    behind: dict[str, Any] = {"dispatcher": OVERLAPPED}
    small, full = published("Qwen3-4B"), {"recompute": 1}
    verl = [
        Case("verl", name, moe, "h20", n, {"expert": 8} | full, tokens("h20", mfu, moe), 4096, 16 * n, rows=2)
        for n, mfu in ((8, 0.40), (16, 0.37), (32, 0.31))
    ]
    return [
        Case(bridge, "Llama 3 8B, fp8", LLAMA3_8B, h100, 8, {}, 14451.0, 8192, 128, **fp8),
        Case(bridge, "Llama 3 70B, fp8", LLAMA3_70B, h100, 64, deep, 1621.0, 8192, 256, **fp8),
        Case(bridge, "Llama 3 70B, fp8", LLAMA3_70B, h100, 32, deep | {"pipeline": 4}, 1638.0, 8192, 128, **fp8),
        Case(bridge, name8, moe, "b200", 8, {"expert": 8}, 9691.0, 4096, 512, used="mixture_s", **fp8),
        Case(bridge, name8, moe, "gb200", 8, {"expert": 8}, 26084.0, 4096, 512, rows=4, **fp8),
        Case("Pai-Megatron", name, moe, "h800", 16, {"pipeline": 2, "expert": 8}, 6325.0, 8192, 256),
        *verl,
        Case("prime-rl", "Qwen3-4B, 16k", small, h100, 8, full, 26000.0 / 8, 16384, 64, used=NOT_FITTED),
        Case("prime-rl", "Qwen3-4B, 65k", small, h100, 8, full, 29000.0 / 8, 65536, 16, used=NOT_FITTED),
        Case(f"{bridge} 26.02.01", name8, moe, h100, 16, half, 9058.0, 4096, 1024, used="mixture_s", **newer, **fp8),
        Case(f"{bridge} 26.04", name8, moe, h100, 16, {"expert": 16}, 8901.0, 4096, 1024, **newer, **fp8),
        Case(f"{bridge} 26.06", name8, moe, h100, 16, {"expert": 16}, 8826.0, 4096, 1024, **newer, **fp8),
        Case(f"{bridge} 26.04.01", f"{largest}, fp8", vast, h100, 256, eight, 1712.0, 4096, 2048, **behind, **fp8),
        Case("Megatron-LM 5728", name, moe, h100, 32, {"expert": 8}, tokens(h100, 240.5, moe), 4096, 256, **newer),
        Case("Megatron-LM 5728", largest, vast, h100, 256, eight, tokens(h100, 302.0, vast), 4096, 2048, **behind),
    ]


def tokens(gpu: str, figure: float, hf: dict[str, Any], length: int = 4096) -> float:
    """tokens/s/GPU of a figure in TFLOP/s, or of an MFU below 1."""
    tflops = figure if figure > 1 else figure * device_named(gpu).bf16_tflops
    return tflops * 1e12 * length / training_flops(hf, [length])


def left() -> list[Left]:
    """The rows without a prediction."""
    unknown = "its mean length and layout are unknown"
    return [
        Left("verl fully_async", "Qwen3-30B-A3B, 128 H20", "498 s (gen 348, old 29, ref 21, update 86)", unknown),
        Left(
            "verl one_step_off", "Qwen2.5-Math-7B, H20", "699 s (gen 207, old 119, update 344)", f"16 or 32; {unknown}"
        ),
        Left("verl 7203", "Qwen3.5-9B, 8 H800", "290 s (29, 84, 82, 91)", "linear attention is no family of ours"),
        Left("RL-Kernel 345", "Qwen3-8B, 4 + 4 H100", "22.8 s", "batch and lengths unknown; weights travel by disk"),
        Left("vime 358", "Qwen3-4B, 2 + 2 NPU", "178 s, 104 s", "the device has no entry in hardware.py"),
        Left("prime-rl", "Qwen3-30B-A3B, 8 H100, 16k", "6.1k tokens/s", "FSDP over experts: no layout of ours"),
        Left("Megatron-Bridge 26.02", "Qwen3-30B-A3B, fp8, 16 H100", "5,113 tokens/s/GPU", "superseded by 26.02.01"),
    ]
