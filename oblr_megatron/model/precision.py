"""Dtypes, Transformer Engine and FP8: what a run's configuration says of them, in megatron-core's terms."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.checks.machine import Machine, transformer_engine_chosen
from oblr_megatron.checks.packages import TRANSFORMER_ENGINE

if TYPE_CHECKING:
    from oblr_megatron.config import ModelConfig
    from oblr_megatron.model.parallel import Parallel

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def this_machine() -> Machine:
    """What this process finds."""
    if not torch.cuda.is_available():
        return Machine(transformer_engine=_transformer_engine())
    apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return Machine(torch.cuda.get_device_capability(), torch.version.cuda, _transformer_engine(), apex)


def uses_transformer_engine(config: ModelConfig, parallel: Parallel) -> bool:
    """Whether the model's layers are Transformer Engine's; those of a model off the GPU never are."""
    return parallel.device.type == "cuda" and transformer_engine_chosen(config, this_machine())


def precision_fields(config: ModelConfig, *, transformer_engine: bool) -> dict[str, Any]:
    """The fields of megatron's TransformerConfig that say in which precision it computes.

    Args:
        config: the model's.
        transformer_engine: the layers are Transformer Engine's; others know no FP8.
    """
    dtype = DTYPES[config.dtype]
    fields = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16}
    return fields | (fp8_fields(config) if transformer_engine else {})


def fp8_fields(config: ModelConfig) -> dict[str, Any]:
    """Those of FP8; none without it."""
    if config.fp8 == "none":
        return {}
    fields = {
        "fp8": config.fp8,
        "fp8_recipe": config.fp8_recipe,
        "fp8_param": config.fp8_param,
        "first_last_layers_bf16": config.first_last_layers_bf16,
        "num_layers_at_start_in_bf16": config.num_layers_at_start_in_bf16,
        "num_layers_at_end_in_bf16": config.num_layers_at_end_in_bf16,
    }
    if config.fp8_recipe != "delayed":
        return fields
    return fields | {
        "fp8_margin": config.fp8_margin,
        "fp8_amax_history_len": config.fp8_amax_history_len,
        "fp8_amax_compute_algo": config.fp8_amax_compute_algo,
        # Largest values are agreed on after every forward by the ranks that share a sample. Replicas have microbatches
        # of their own number, and would wait for one another.
        "tp_only_amax_red": True,
    }


def _transformer_engine() -> str | None:
    """Its version, if it can be imported."""
    found = TRANSFORMER_ENGINE.found
    return found[1] if found and importlib.util.find_spec("transformer_engine") is not None else None
