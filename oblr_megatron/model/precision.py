"""Translate a run's dtype, Transformer Engine and FP8 settings into megatron-core's configuration fields."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.checks.machine import Machine, transformer_engine_chosen
from oblr_megatron.checks.packages import TRANSFORMER_ENGINE

if TYPE_CHECKING:
    from oblr_megatron.config import ModelConfig
    from oblr_megatron.model.parallel import Parallel

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def this_machine() -> Machine:
    """The GPU, CUDA and packages that this process finds."""
    engine, fault, breaks = _transformer_engine()
    if not torch.cuda.is_available():
        return Machine(transformer_engine=engine, engine_fault=fault, engine_breaks_megatron=breaks)
    return Machine(torch.cuda.get_device_capability(), torch.version.cuda, engine, fault, breaks)


def usable_gpus() -> int:
    """GPUs that torch can use. Its own count is that of NVML, also where the driver is too old or CUDA fails."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def uses_transformer_engine(config: ModelConfig, parallel: Parallel) -> bool:
    """Whether the model is built from Transformer Engine's layers; never without a GPU."""
    return parallel.device.type == "cuda" and transformer_engine_chosen(config, this_machine())


def has_bfloat16_products() -> bool:
    """Whether a GPU, or a kernel for this processor, multiplies bfloat16. x86 needs AVX-512 for such a kernel."""
    return torch.cuda.is_available() or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def slow_bfloat16(config: ModelConfig) -> str | None:
    """A warning if the model is bfloat16 and this machine has no kernel for its products (docs/precision.md)."""
    if config.dtype != "bfloat16" or has_bfloat16_products():
        return None
    return "bfloat16 takes up to 50 times as long as float32 on this processor. Fix: set model.dtype to float32"


def precision_fields(config: ModelConfig, *, transformer_engine: bool) -> dict[str, Any]:
    """The precision fields of megatron's TransformerConfig. Only Transformer Engine's layers have FP8."""
    dtype = DTYPES[config.dtype]
    fields = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16}
    if config.fp8 == "none" or not transformer_engine:
        return fields
    return fields | {
        "fp8": config.fp8,
        "fp8_recipe": config.fp8_recipe,
        "first_last_layers_bf16": config.keeps_layers_in_bf16,
        "num_layers_at_start_in_bf16": config.num_layers_at_start_in_bf16,
        "num_layers_at_end_in_bf16": config.num_layers_at_end_in_bf16,
    }


@cache
def _transformer_engine() -> tuple[str | None, str, bool]:
    """Transformer Engine's version, why its layers cannot be imported, and whether megatron-core fails too.

    An installed package says little: its torch part may be absent, or built for another torch. Then megatron-core fails
    when a model is built.
    """
    installed = TRANSFORMER_ENGINE.installed
    if installed is None:
        return None, "", False
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # noqa: BLE001  a missing library, symbol, package or file: each has its own class
        line = next(iter(str(error).strip().splitlines()), "")
        fault = f"{installed[0]} {installed[1]}: {type(error).__name__}: {line}"
        return None, fault, not isinstance(error, ImportError)
    return installed[1], "", False
