"""The constants of the cost model, each with where its default comes from, and the machine they belong to. No torch.

    machine = Machine(device_named("h100"))                                # the defaults
    machine = Machine(device_named("h100"), read_constants(Path("constants.json")))
    machine = cpu_machine(cores=2)

A device says what a GPU could do by its data sheet; the constants say how much of it a step gets, and what is paid for
every message and launch. Those of the data sheet stay as they are, the constants can be fitted to measured runs
(`planner/calibration.py`).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from oblr_megatron.errors import UserError
from oblr_megatron.observe.performance.hardware import Device


@dataclass(frozen=True, slots=True)
class Constants:
    """Efficiencies (of a device's figure, 0 to 1), seconds, and sizes at which an efficiency is half of its best.

    Defaults are for NVIDIA's GPUs under NCCL. *Set*: a round figure by judgement, not measured here, and not fitted to
    the published throughputs it is held against in docs/planner.md.
    """

    product: float = 0.75
    """Share of peak FLOP/s of a large matrix product. cuBLAS in bf16 on an H100 reaches 0.7 to 0.8; set."""
    product_fp8: float = 0.60
    """The same of the FP8 peak, with the quantisation of operands; set."""
    half_tokens: float = 256.0
    """Tokens at which a product reaches half of that: e(n) = n / (n + half_tokens). Weights are read once a product,
    and 989 TFLOP/s over 3.35 TB/s are 295 FLOPs a byte, so that 295 tokens hide half of their reading in bf16."""
    half_width: float = 256.0
    """The same of the narrower side of a weight's shard: two tiles of 128 wide; set."""
    attention: float = 0.45
    """Share of peak FLOP/s of fused attention; FlashAttention-2 and -3 report 0.35 and 0.75 on an H100."""
    memory: float = 0.70
    """Share of memory bandwidth of norms, activations, optimizer; set."""
    passes: float = 1.0
    """Times that the elementwise work of a layer moves what `elementwise_bytes` counts; 1 for fused kernels."""
    link: float = 0.70
    """Share of a link's bandwidth of a large exchange; NCCL's bus bandwidth in nccl-tests is 0.75 to 0.8 of NVLink."""
    message_s: float = 6e-6
    """Seconds of a hop of an exchange within a node, however small; NCCL's latency over NVLink."""
    node_message_s: float = 15e-6
    """The same between nodes; NCCL's over InfiniBand."""
    layer_s: float = 0.4e-3
    """Seconds that the host takes to launch a layer's forward pass. On a GPU it runs ahead: only what is longer counts;
    set, 20 to 40 kernels at 10 us each."""
    mixture_s: float = 2.2e-3
    """Seconds that a mixture's layer takes more in a forward pass, whatever its tokens: the host waits for the routers'
    counts and launches the experts' products one by one. A third of what Megatron-Bridge's published throughputs of
    Qwen3-30B-A3B at 1 and at 8 sequences a microbatch (B200, B300; docs/planner.md) leave for it."""
    run_s: float = 5e-3
    """Seconds of every run of the pipeline (a fold, a window, a group) beside its microbatches; set."""
    step_s: float = 0.05
    """Seconds a step takes in each phase whatever its size (packing, clipping, logging); set."""
    hidden: float = 0.7
    """Share of an exchange that an overlap option hides behind products; set."""
    decode: float = 0.60
    """Share of memory bandwidth of a decoding step's weights and KV cache; set."""
    decode_step_s: float = 6e-3
    """Seconds of a decoding step beside its arithmetic: vLLM's scheduler, sampling, detokenisation; set."""
    prefill: float = 0.50
    """Share of peak FLOP/s of a prefill; set."""


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
)
"""Where the fit on a CPU begins; each is replaced by what `study scaling` finds."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What runs a layout. Example: Machine(device_named("h100")), whose ranks have a device each."""

    device: Device
    constants: Constants = DEFAULT
    cores: int | None = None
    """Of a CPU, whose ranks share them; None: every rank has a device of its own."""

    @property
    def on_gpu(self) -> bool:
        """Whether ranks have GPUs."""
        return self.cores is None

    def stretch(self, ranks: int) -> float:
        """How much longer a rank's work takes with so many ranks on the node: max(1, ranks / cores)."""
        return 1.0 if self.cores is None else max(1.0, ranks / self.cores)

    def with_constants(self, constants: Constants) -> Machine:
        """The same machine under other constants."""
        return replace(self, constants=constants)


def cpu_machine(cores: int | None = None, constants: Constants = CPU) -> Machine:
    """This CPU, as a node of any number of ranks.

    A core's peak is taken as 150 GFLOP/s in fp32, its memory as 20 GB/s, a loopback connection as 4 GB/s: round figures
    above what is reached, which the fitted constants correct.
    """
    count = cores or len(os.sched_getaffinity(0))
    gibibytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    device = Device("cpu", 0.15, None, gibibytes, 20.0, 4.0, 4.0, 1 << 16)
    return Machine(device, constants, count)


def read_constants(path: Path) -> Constants:
    """Constants from a JSON file that `plan --calibrate` wrote; what it leaves out keeps its default.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    fix = "write one with `oblr-megatron plan --calibrate RUN_DIR --out FILE`"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["constants"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("no file of constants", where=str(path), fix=fix) from error
    known = {field.name for field in fields(Constants)}
    wrong = [name for name, value in found.items() if name not in known or not isinstance(value, int | float)]
    if wrong:
        raise UserError(f"{wrong[0]!r} is no constant, or no number", where=str(path), fix=fix)
    return Constants(**found)


def as_table(constants: Constants) -> dict[str, float]:
    """What `read_constants` reads."""
    return asdict(constants)
