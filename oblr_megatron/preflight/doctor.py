"""`oblr-megatron doctor [--json] [--lock FILE ...]`: what is installed, and what a run uses because of it.

With a lock it also names each package that differs from it. Loads with the standard library alone, and works where
packages are missing or cannot be imported: it says so. Imports no torch at load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from oblr_megatron.checks.machine import RECIPES, Machine, build_problem, compiler_problem, driver_problem
from oblr_megatron.checks.packages import PACKAGES, TRANSFORMER_ENGINE, installed, problems
from oblr_megatron.errors import EXIT_OK, EXIT_USER
from oblr_megatron.runtime.temporary import GPU

if TYPE_CHECKING:
    from rich.console import Console

DRIVER_FILE = Path("/proc/driver/nvidia/version")
FULL_INSTALL = "a GPU, and Transformer Engine (docs/precision.md)"


@dataclass(frozen=True, slots=True)
class Gpu:
    """Example: Gpu(name="NVIDIA H100 80GB HBM3", capability="9.0", memory_gib=79.1)"""

    name: str
    capability: str
    memory_gib: float


@dataclass(frozen=True, slots=True)
class Finding:
    """The implementation of one part of a run on this machine.

    Example: Finding("optimizer", "torch", "several kernels per step, same result", "transformer-engine or apex")
    """

    part: str
    used: str
    means: str
    more: str = ""  # what to install for more; "" if there is nothing better


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The whole report. With `problems` the command ends with status 2."""

    packages: dict[str, str | None]
    platform: dict[str, str | None]  # python, processor, CUDA, NCCL, driver
    gpus: list[Gpu]
    findings: list[Finding]
    problems: list[str] = field(default_factory=list)
    locks: dict[str, str] = field(default_factory=dict)  # file of a lock -> how many of its packages are installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--lock", type=Path, nargs="+", default=[], metavar="FILE", help="compare what is installed with these locks"
    )
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """Print the report; returns 2 if it names a problem, such as a needed package that is missing."""
    report = examine(options.lock)
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    elif find_spec("rich") is None:
        show_plain(report)
    else:
        from rich.console import Console

        show(report, Console())
    return EXIT_USER if report.problems else EXIT_OK


def examine(locks: Sequence[Path] = ()) -> DoctorReport:
    """Examine this machine; imports the installed packages. Each package that differs from a lock is a problem.

    Raises:
        UserError: a lock cannot be read.
    """
    packages, wrong = installed(), problems()
    compared: dict[str, str] = {}
    for lock in locks if find_spec("packaging") else ():  # else a problem says that it is missing
        from oblr_megatron.checks.lock import differences, pins

        differing = differences(lock)
        wrong += [f"{line} [{lock}]" for line in differing]
        total = len(pins(lock))
        compared[str(lock)] = f"{total - len(differing)} of {total} packages are installed as locked"
    if packages["torch"] is None:
        return DoctorReport(packages, _platform(), [], [], wrong, compared)
    try:
        from oblr_megatron.model.precision import this_machine
    except (ImportError, OSError) as error:  # a package or a shared library that torch needs is missing
        wrong.append(_fault("torch", error))
        return DoctorReport(packages, _platform(), [], [], wrong, compared)
    machine = this_machine()
    if machine.engine_fault:
        wrong.append(f"Transformer Engine cannot be imported: {machine.engine_fault}. Build it against this torch")
    around = _platform() | _cuda_platform()
    on_gpu = machine.capability is not None  # forward compatibility works with an old driver
    driver = driver_problem(around["driver"], around["CUDA of torch"]) if GPU.exists() else None  # not in image builds
    faults = (compiler_problem(), build_problem(on_gpu=True)) if on_gpu else (driver,)
    wrong += [f"{fault[0]}. Fix: {fault[1]}" for fault in faults if fault is not None]
    used = findings(machine, packages)
    others: dict[str, Callable[[], Finding]] = {"pydantic": _rewards}
    if packages["megatron-core"] is not None and not machine.engine_fault:  # which may break megatron-core's import
        others["megatron-core"] = lambda: _optimizer(machine)
    for name, part in others.items():
        try:
            used.append(part())
        except (ImportError, OSError) as error:  # e.g. transformers is missing
            wrong.append(_fault(name, error))
    return DoctorReport(packages, around, _gpus(), used, wrong, compared)


def _fault(name: str, error: Exception) -> str:
    return f"{name} cannot be imported: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def findings(machine: Machine, packages: dict[str, str | None]) -> list[Finding]:
    """Parts that a run with the default configuration uses on a machine, as far as known without further imports."""
    return [*_layers(machine, packages), _fp8(machine), *_devices(machine, packages), _quantize(packages)]


def _layers(machine: Machine, packages: dict[str, str | None]) -> list[Finding]:
    """Whether the model's layers are Transformer Engine's."""
    if not machine.has_layers:
        without = "the same numbers; Qwen3-MoE on GPUs, fused norms and FP8 are not available"
        attention = "one call per packed sample; context parallelism gathers keys and values"
        return [
            Finding("layers", "megatron-core's own", without, FULL_INSTALL),
            Finding("attention", "torch's scaled_dot_product_attention", attention, FULL_INSTALL),
            Finding("norms", "torch's RMSNorm", "separate kernels", FULL_INSTALL),
        ]
    version, flash = machine.transformer_engine or "", packages["flash-attn"]
    known = TRANSFORMER_ENGINE.accepts(version)
    doubt = "" if known else f"megatron-core 0.16 to 0.19 were written for {TRANSFORMER_ENGINE.accepted}"
    kernels, more = ("FlashAttention or cuDNN", "") if flash else ("cuDNN", "flash-attn, faster for some shapes")
    return [
        Finding("layers", f"Transformer Engine {version}", "fused norms, grouped experts, FP8 on request", doubt),
        Finding("attention", f"Transformer Engine's ({kernels})", "context parallelism in a ring", more),
        Finding("norms", "Transformer Engine's RMSNorm", "one kernel together with the next product"),
    ]


def _fp8(machine: Machine) -> Finding:
    missing = {name: recipe.missing(machine) for name, recipe in RECIPES.items()}
    possible = [name for name, lack in missing.items() if lack is None]
    lacking = {lack for lack in missing.values() if lack is not None}
    more = "; ".join(
        f"{', '.join(name for name, lack in missing.items() if lack == what)}: {what}" for what in sorted(lacking)
    )
    if possible:
        return Finding("FP8", f"on request: {', '.join(possible)}", 'model.fp8 = "hybrid", model.fp8_recipe', more)
    return Finding("FP8", "none", "matrix products use the model's dtype", more)


def _optimizer(machine: Machine) -> Finding:
    from oblr_megatron.model.optimizer import optimizer_implementation

    used = optimizer_implementation() if machine.capability is not None else "torch"  # the CPU shim replaces the others
    if used == "torch":
        return Finding("optimizer", "torch", "several kernels per step, same result", "transformer-engine or apex")
    return Finding("optimizer", f"{used}'s fused Adam", "one kernel for many parameters")


def _devices(machine: Machine, packages: dict[str, str | None]) -> list[Finding]:
    """Parts that depend on GPUs: collectives, engines, the push of weights."""
    vllm = f"vLLM {packages['vllm']}"
    if machine.capability is None:
        parts = [
            Finding("ranks", "gloo", "all parallelism works, with processes on CPU cores", "GPUs"),
            Finding("rollouts", f"{vllm} on CPU cores", "eager mode, no sleep mode, no FP8 weights", "GPUs"),
            Finding("weight push", "shared memory", "to engines and servers on this machine"),
        ]
    else:
        graphs = 'CUDA graphs, sleep mode; rollout.quantization = "fp8" on request'
        parts = [
            Finding("ranks", "NCCL", "collectives between GPUs"),
            Finding("rollouts", f"{vllm} on GPUs", graphs),
            Finding("weight push", "CUDA IPC; NCCL to servers", "to engines on the trainer's GPUs and on other GPUs"),
        ]
    if machine.capability is None and (problem := build_problem(on_gpu=False)):  # as on a login node
        parts[1] = Finding("rollouts", "none", problem[0], problem[1])
    if packages["vllm"] is None:
        parts[1] = Finding("rollouts", "none", "only saved samples can be replayed", "install vllm")
    return parts


def _rewards() -> Finding:
    from oblr_megatron.config.reward import RewardConfig

    workers, cores = RewardConfig.model_fields["num_workers"].default, len(os.sched_getaffinity(0))
    more = f"reward.num_workers up to the {cores} cores" if cores > workers else ""
    return Finding("rewards", f"{workers} processes", "responses are scored in processes with deadlines", more)


def _quantize(packages: dict[str, str | None]) -> Finding:
    version = packages["nvidia-modelopt"]
    if version is None:
        means = "`oblr-megatron quantize` cannot write FP8 checkpoints"
        return Finding("export in FP8", "none", means, "pip install nvidia-modelopt")
    return Finding("export in FP8", f"nvidia-modelopt {version}", "`oblr-megatron quantize`")


def _platform() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "processor": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
    }


def _cuda_platform() -> dict[str, str | None]:
    import torch

    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {
        "CUDA of torch": torch.version.cuda,
        "NCCL": None if nccl is None else ".".join(map(str, nccl)),
        "driver": driver_version(DRIVER_FILE),
    }


def driver_version(file: Path) -> str | None:
    """Version of NVIDIA's driver from its kernel module; None without a driver."""
    try:
        text = file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else None


def _gpus() -> list[Gpu]:
    import torch

    from oblr_megatron.model.precision import usable_gpus

    properties = [torch.cuda.get_device_properties(index) for index in range(usable_gpus())]
    return [Gpu(one.name, f"{one.major}.{one.minor}", round(one.total_memory / 2**30, 1)) for one in properties]


def tables(report: DoctorReport) -> dict[str, list[tuple[str, ...]]]:
    """Three tables by title; the first row has the names of the columns."""
    accepted = {package.name: package for package in PACKAGES}
    rows = [
        (name, version or "not installed", accepted[name].accepted or "any", "yes" if accepted[name].needed else "")
        for name, version in report.packages.items()
    ]
    machine = [(name, value or "none") for name, value in report.platform.items()]
    machine += [
        (f"GPU {index}", f"{gpu.name}, {gpu.capability}, {gpu.memory_gib} GiB") for index, gpu in enumerate(report.gpus)
    ]
    parts = [(one.part, one.used, one.means, one.more) for one in report.findings]
    return {
        "Installed": [("package", "version", "accepted", "needed"), *rows],
        "Machine": [("what", "found"), *machine],
        "Used": [("part", "used here", "meaning", "more with"), *parts],
    }


def show(report: DoctorReport, console: Console) -> None:
    """Print three tables and the problems."""
    from rich.table import Table

    for title, (columns, *rows) in tables(report).items():
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table, markup=False)
    for lock, compared in report.locks.items():
        console.print(f"{lock}: {compared}", highlight=False, markup=False)
    for problem in report.problems:
        console.print(f"problem: {problem}", style="red", highlight=False, markup=False)


def show_plain(report: DoctorReport) -> None:
    """Print the same without rich."""
    for title, rows in tables(report).items():
        if len(rows) == 1:
            continue
        print(title)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        print()
    for lock, compared in report.locks.items():
        print(f"{lock}: {compared}")
    for problem in report.problems:
        print(f"problem: {problem}")
