"""Stops vLLM from packing weights on a CPU, so that a weight update takes effect. Imports no vllm.

vLLM's CPU backend gives each linear layer's weight to oneDNN (or an sgl kernel) at load time, and then computes with
that packed copy. A later weight update changes the parameter but not the copy: log-probs are wrong by more than 1, and
no error is raised. vLLM packs experts in place, so an update would be read as if it were packed. Without packing the
layers read their parameters in the checkpoint's layout. `engine.transfer` checks this before the first push.
"""

from __future__ import annotations

import logging
from enum import Enum

logger = logging.getLogger(__name__)


def disable_for_layers() -> None:
    """Make vLLM use torch's matrix product on a CPU, which reads the parameter each time.

    Raises:
        RuntimeError: this vLLM has other switches; whether weight updates reach its layers must be checked again.
    """
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils as layers

    missing = [
        name
        for module, name in ((ops, "_supports_onednn"), (layers, "check_cpu_sgl_kernel"))
        if not hasattr(module, name)
    ]
    if missing:
        raise RuntimeError(f"this vLLM has no {' and no '.join(missing)}: CPU weight packing cannot be turned off")
    ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False
    logger.info("CPU weight packing is off: weight updates take effect")


def disable_for_experts() -> None:
    """Make vLLM compute experts on a CPU with `engine.cpu.experts` instead of a packing kernel.

    Raises:
        RuntimeError: this vLLM chooses its kernel elsewhere; whether weight updates reach its experts must be checked.
    """
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    if not hasattr(unquantized, "backend_to_kernel_cls"):
        raise RuntimeError("this vLLM has no backend_to_kernel_cls: packing of experts on a CPU cannot be turned off")
    unquantized.backend_to_kernel_cls = _unpacked_experts


def _unpacked_experts(backend: Enum) -> list[type]:
    """Replaces vLLM's list of kernels for unquantized experts; on a CPU it has packing ones only."""
    from oblr_megatron.engine.cpu.experts import UnpackedExperts

    assert backend.value == "CPU", f"backend {backend.value!r} for experts on a CPU"
    return [UnpackedExperts]
