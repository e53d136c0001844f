"""vLLM plugin (entry point `vllm.general_plugins`): every vLLM process of ours runs it first. Imports no vllm.

It registers our weight-transfer engines and makes speculation draw what plain sampling draws
(`extras.speculation`). On a CPU it also stops vLLM from packing weights (`engine.cpu.packing`), lets it return
routes (`engine.routes`), and makes norms and draws faster (`engine.cpu.kernels`).
"""

from __future__ import annotations

import multiprocessing
import os

SHM_BACKEND = "oblr_shm"
IPC_BACKEND = "oblr_ipc"
SERVER_SHM_BACKEND = "oblr_server_shm"
NCCL_BACKEND = "oblr_nccl"
BACKENDS = {
    ("cpu", False): SHM_BACKEND,
    ("cuda", False): IPC_BACKEND,
    ("cpu", True): SERVER_SHM_BACKEND,
    ("cuda", True): NCCL_BACKEND,
}
"""Transport of weights by device and `EngineSpec.server`."""


def register() -> None:
    """Make all our changes to this vLLM process. May be called any number of times."""
    from vllm.platforms import current_platform

    from oblr_megatron.engine import routes
    from oblr_megatron.engine.cpu import kernels, packing
    from oblr_megatron.extension import available, extension
    from oblr_megatron.runtime.gloo import share_device
    from oblr_megatron.runtime.malloc import keep_freed_memory

    die_with_engine()
    register_transfer_engines()
    if available("rollout.speculation"):
        extension("rollout.speculation draws")()
    if current_platform.is_cpu():
        share_device()
        keep_freed_memory()
        packing.disable_for_layers()
        packing.disable_for_experts()
        kernels.install()
        routes.allow_on_cpu()


def die_with_engine() -> None:
    """End a process that a vLLM engine has started when its parent ends, even by SIGKILL."""
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
