"""vLLM plugin (entry point `vllm.general_plugins`): every vLLM process of ours runs it first. Imports no vllm.

It registers our weight-transfer engines and makes speculation draw what plain sampling draws
(`engine.exact_sampling`). On a CPU it also stops vLLM from packing weights. vLLM's CPU backend gives each linear
layer's weight to oneDNN (or an sgl kernel) at load time, and then computes with that packed copy. A later weight update
changes the parameter but not the copy: log-probs are wrong by more than 1, and no error is raised. vLLM packs experts
in place, so an update would be read as if it were packed. Without packing the layers read their parameters in the
checkpoint's layout. `engine.transfer` checks this before the first push. A CPU engine may also return routes
(`engine.routes`), and has faster norms and draws (`engine.cpu_kernels`).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from enum import Enum
from typing import Any

logger = logging.getLogger(__name__)

SHM_BACKEND = "oblr_shm"
IPC_BACKEND = "oblr_ipc"
SERVER_SHM_BACKEND = "oblr_server_shm"
NCCL_BACKEND = "oblr_nccl"


def register() -> None:
    """Make all our changes to this vLLM process. May be called any number of times."""
    from vllm.platforms import current_platform

    from oblr_megatron.engine import cpu_kernels, exact_sampling, routes
    from oblr_megatron.runtime.gloo import share_device
    from oblr_megatron.runtime.malloc import keep_freed_memory

    die_with_server()
    register_transfer_engines()
    exact_sampling.install()
    if current_platform.is_cpu():
        share_device()
        keep_freed_memory()
        disable_weight_packing()
        disable_expert_packing()
        cpu_kernels.install()
        routes.allow_on_cpu()


def die_with_server() -> None:
    """End a process that vLLM's API server or engine has started when its parent ends, even by SIGKILL."""
    from oblr_megatron.runtime.processes import die_with

    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid is not None and starter.pid == os.getppid():
        die_with(starter.pid)


def register_transfer_engines() -> None:
    """Register our backends by name. vLLM imports a module when its backend is used."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    for name, module, class_name in (
        (SHM_BACKEND, "transfer", "ShmWeightTransferEngine"),
        (IPC_BACKEND, "transfer", "RecoveringIpcWeightTransferEngine"),
        (SERVER_SHM_BACKEND, "transfer", "ServerShmWeightTransferEngine"),
        (NCCL_BACKEND, "transfer_nccl", "CheckedNcclWeightTransferEngine"),
    ):
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, f"oblr_megatron.engine.{module}", class_name)


def disable_weight_packing() -> None:
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


def disable_expert_packing() -> None:
    """Make vLLM compute experts on a CPU with `engine.experts` instead of a packing kernel.

    Raises:
        RuntimeError: this vLLM chooses its kernel elsewhere; whether weight updates reach its experts must be checked.
    """
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    if not hasattr(unquantized, "backend_to_kernel_cls"):
        raise RuntimeError("this vLLM has no backend_to_kernel_cls: packing of experts on a CPU cannot be turned off")
    unquantized.backend_to_kernel_cls = _unpacked_experts


def _unpacked_experts(backend: Enum) -> list[type]:
    """Replaces vLLM's list of kernels for unquantized experts; on a CPU it has packing ones only."""
    from oblr_megatron.engine.experts import UnpackedExperts

    assert backend.value == "CPU", f"backend {backend.value!r} for experts on a CPU"
    return [UnpackedExperts]


class ReadBack:
    """Mixed into vLLM's worker class in an API server (--worker-extension-cls)."""

    model_runner: Any

    def oblr_read_back(self) -> dict[str, str]:
        """Digests of the weights in place; see `weights.verify`. The server calls this method by name."""
        from oblr_megatron.weights.verify import read_back

        return read_back(self.model_runner.get_model())
