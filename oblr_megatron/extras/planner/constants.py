"""The constants of the cost model with the sources of their defaults, and the machine. Imports no torch.

    machine = PlannerMachine(device_named("h100"))                                # the defaults
    machine = PlannerMachine(device_named("h100"), read_constants(Path("constants.json")))
    machine = cpu_machine(cores=2)

A `Device` has the peak numbers of a data sheet. The constants are the share of these peaks that a step reaches, and the
latency of each message and launch. `planner/calibration.py` fits the constants to measured runs.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

from oblr_megatron.errors import UserError
from oblr_megatron.observe.performance.hardware import Device


@dataclass(frozen=True, slots=True)
class Constants:
    """Efficiencies (share of a device's peak, 0 to 1), seconds, and sizes at half of the best efficiency.

    The defaults are for NVIDIA GPUs with NCCL. *Assumed*: a round number, neither measured here nor fitted to the
    published throughputs in docs/planner.md.
    """

    product: float = 0.75
    """Share of peak FLOP/s in a large matrix product. cuBLAS in bf16 on an H100 reaches 0.7 to 0.8; assumed."""
    product_fp8: float = 0.60
    """Share of the FP8 peak, including the quantisation of operands; assumed."""
    half_tokens: float = 256.0
    """Tokens at half of that efficiency: e(n) = n / (n + half_tokens). 989 TFLOP/s over 3.35 TB/s are 295 FLOPs per
    byte, so 295 tokens hide half of the time to read bf16 weights."""
    half_width: float = 256.0
    """Width at half efficiency, for the narrower side of a weight shard: two tiles of 128; assumed."""
    attention: float = 0.45
    """Share of peak FLOP/s in fused attention. FlashAttention-2 and -3 report 0.35 and 0.75 on an H100."""
    memory: float = 0.70
    """Share of memory bandwidth in norms, activations and the optimizer; assumed."""
    passes: float = 1.0
    """Factor on the bytes that `elementwise_bytes` counts; 1 for fused kernels."""
    link: float = 0.70
    """Share of link bandwidth in a large collective. NCCL's bus bandwidth in nccl-tests is 0.75 to 0.8 of NVLink."""
    message_s: float = 6e-6
    """Latency of one hop within a node, seconds; NCCL's over NVLink."""
    node_message_s: float = 15e-6
    """Latency of one hop between nodes, seconds; NCCL's over InfiniBand."""
    layer_s: float = 0.4e-3
    """Seconds for the host to launch a layer's forward pass. On a GPU only the excess over the kernels counts. Assumed:
    20 to 40 kernels at 10 us."""
    mixture_s: float = 2.2e-3
    """Additional seconds per layer with experts in a forward pass: the host waits for the router's counts and launches
    the experts one by one. A third of the time left unexplained in Megatron-Bridge's published throughputs of
    Qwen3-30B-A3B at 1 and 8 sequences per microbatch (B200, B300; tools/bench/planner_rows.py)."""
    node_copies: float = 1.0
    """Share of an all-to-all's bytes to other nodes that travels. Below 1 for dispatchers that send a token to a node
    once for all of its experts there (DeepEP, HybridEP); ours does not."""
    run_s: float = 5e-3
    """Fixed seconds per run of the pipeline (a fold, a window, a group); assumed."""
    step_s: float = 0.05
    """Fixed seconds per phase of a step (packing, clipping, logging); assumed."""
    host_gb_s: float = 20.0
    """1e9 bytes/s between a GPU and pinned host memory, one direction. PCIe 5 has 64; eight GPUs share the host's
    memory; assumed."""
    hidden: float = 0.7
    """Share of a collective that an overlap option hides behind products; assumed."""
    decode: float = 0.95
    """Share of memory bandwidth when a decoding step reads weights and KV cache. From vLLM 0.30's medians between
    tokens, Qwen3-8B in bf16 on an H100, 1 to 256 sequences (tools/bench/planner_rows.py): all within 4%."""
    decode_step_s: float = 2e-3
    """Fixed seconds per decoding step: vLLM's scheduler, sampling, detokenisation; from the same figures."""
    rollout: float = 1.6
    """Seconds of decoding in a rollout over those that the terms above give: uneven engines, log-probs, transfers. Not
    measured: at this value NeMo RL's 11 published steps (tools/bench/planner_rows.py) are right in the geometric mean;
    singly they ask for 0.9 (235B, one step off policy) to 2.2 (30B-A3B)."""
    prefill: float = 0.50
    """Share of peak FLOP/s in a prefill; assumed."""


DEFAULT = Constants()
CPU = Constants(
    product=0.4,
    half_tokens=8.0,
    half_width=8.0,
    attention=0.25,
    memory=0.5,
    passes=3.0,  # nothing is fused
    link=0.5,
    message_s=3e-4,
    node_message_s=3e-4,
    layer_s=1e-3,
    mixture_s=1e-3,
    run_s=5e-3,
    step_s=5e-3,
    decode_step_s=2e-3,
    rollout=1.0,
)
"""Initial values of the fit on a CPU; `study scaling` replaces each of them."""


@dataclass(frozen=True, slots=True)
class PlannerMachine:
    """The machine of a run. Example: PlannerMachine(device_named("h100")), with one device per rank."""

    device: Device
    constants: Constants = DEFAULT
    cores: int | None = None
    """Cores of a CPU, which all ranks share; None if every rank has its own device."""

    @property
    def on_gpu(self) -> bool:
        """Whether ranks have GPUs."""
        return self.cores is None

    def peak_flops(self, *, fp8: bool) -> float:
        """FLOP/s of a device's matrix products; in bf16 if it has no FP8."""
        tflops = self.device.fp8_tflops if fp8 else None
        return (tflops or self.device.bf16_tflops) * 1e12

    def stretch(self, ranks: int) -> float:
        """Slowdown of a rank's work when ranks share cores: max(1, ranks / cores)."""
        return 1.0 if self.cores is None else max(1.0, ranks / self.cores)


def cpu_machine(cores: int | None = None) -> PlannerMachine:
    """This CPU as a node with any number of ranks.

    Assumed peaks: 150 GFLOP/s per core in fp32, 20 GB/s of memory, 4 GB/s of loopback. They are upper bounds, which the
    fitted constants correct.
    """
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    device = Device("cpu", 0.15, None, gigabytes, 20.0, 4.0, 4.0, 1 << 16)
    return PlannerMachine(device, CPU, cores or len(os.sched_getaffinity(0)))


def read_constants(path: Path) -> Constants:
    """Read constants from a JSON file of `plan --calibrate`; absent ones keep their defaults.

    Raises:
        UserError: the file cannot be read, or holds something other than numbers above 0.
    """
    fix = "write one with `oblr-megatron plan --calibrate RUN_DIR --out FILE`"
    try:
        values = dict(json.loads(path.read_text(encoding="utf-8"))["constants"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("not a file of constants", where=str(path), fix=fix) from error
    known = {field.name for field in fields(Constants)}
    wrong = [name for name, value in values.items() if name not in known or not _above_0(value)]
    if wrong:
        raise UserError(f"{wrong[0]!r} is not a constant with a number above 0", where=str(path), fix=fix)
    return Constants(**values)


def _above_0(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf
