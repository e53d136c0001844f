"""What every vLLM process of ours does first: the entry point `vllm.general_plugins` of this package.

It makes our weight-transfer engines known, and on a CPU it keeps vLLM from packing weights. vLLM's CPU backend hands
each linear layer's weight to oneDNN (or an sgl kernel) once, at load time, and computes with that packed copy for ever:
a later weight update reaches the parameter and not the copy, log-probs are then wrong by more than 1, and no error is
raised. Experts it packs in place, and an update would be read as if it were packed. Without packing the layers read
their parameters, as they are in a checkpoint. `weights.transfer` checks that they do before the first push.

Importing this module imports no vllm.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from enum import Enum

logger = logging.getLogger(__name__)

SHM_BACKEND = "oblr_shm"
IPC_BACKEND = "oblr_ipc"
SERVER_SHM_BACKEND = "oblr_server_shm"
NCCL_BACKEND = "oblr_nccl"
_TRANSFER = "oblr_megatron.engine.transfer"
_TRANSFER_SERVER = "oblr_megatron.engine.transfer_server"
_TRANSFER_NCCL = "oblr_megatron.engine.transfer_nccl"


def register() -> None:
    """Register the transfer engines and, on a CPU, turn weight packing off. May be called any number of times."""
    from vllm.platforms import current_platform

    die_with_server()
    register_transfer_engines()
    if current_platform.is_cpu():
        disable_weight_packing()
        disable_expert_packing()


def die_with_server() -> None:
    """In a process that vLLM's API server or engine has started: end when that one does, also by SIGKILL."""
    from oblr_megatron.runtime.stopping import die_with

    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid is not None and starter.pid == os.getppid():
        die_with(starter.pid)


def register_transfer_engines() -> None:
    """Our backends by name; their modules are imported when one of them is used."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, name, module, class_name in (
        (WeightTransferEngineFactory, SHM_BACKEND, _TRANSFER, "ShmWeightTransferEngine"),
        (WeightTransferEngineFactory, IPC_BACKEND, _TRANSFER, "RecoveringIpcWeightTransferEngine"),
        (WeightTransferEngineFactory, SERVER_SHM_BACKEND, _TRANSFER_SERVER, "ServerShmWeightTransferEngine"),
        (WeightTransferEngineFactory, NCCL_BACKEND, _TRANSFER_NCCL, "CheckedNcclWeightTransferEngine"),
        (WeightTransferTrainerFactory, SHM_BACKEND, _TRANSFER, "ShmTrainerWeightTransferEngine"),
        (WeightTransferTrainerFactory, IPC_BACKEND, _TRANSFER, "IpcTrainerWeightTransferEngine"),
    ):
        if name not in factory._registry:
            factory.register_engine(name, module, class_name)


def disable_weight_packing() -> None:
    """Make vLLM's dispatch of CPU matrix products fall through to torch's own, which reads the parameter each time.

    Raises:
        RuntimeError: this vLLM has no such switches; its weight updates have to be looked at anew.
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
    layers.check_cpu_sgl_kernel = _never  # type: ignore[assignment]
    logger.info("CPU weight packing is off: weight updates take effect")


def disable_expert_packing() -> None:
    """Make vLLM choose experts that read the weights as they are loaded, where it would choose a packing kernel.

    Raises:
        RuntimeError: this vLLM makes that choice elsewhere; its mixtures have to be looked at anew.
    """
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    if not hasattr(unquantized, "backend_to_kernel_cls"):
        raise RuntimeError("this vLLM has no backend_to_kernel_cls: packing of experts on a CPU cannot be turned off")
    unquantized.backend_to_kernel_cls = _unpacked_experts


def _unpacked_experts(backend: Enum) -> list[type]:
    """Stands in for vLLM's list of kernels for unquantized experts, which on a CPU holds packing ones only."""
    from oblr_megatron.engine.experts import UnpackedExperts

    assert backend.value == "CPU", f"a mixture by the backend {backend.value!r}, on a CPU"
    return [UnpackedExperts]


def _never(*_: object) -> bool:
    """Stands in for the question whether a layer's weight is packed for the sgl kernel."""
    return False
