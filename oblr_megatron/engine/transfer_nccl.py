"""`oblr_nccl`: a push into a server on GPUs, over vLLM's own NCCL backend. Not yet run on a GPU.

vLLM's engine receives a whole model in one update. This one receives one bucket per update. So a push needs memory for
the model and one bucket, each checksum is compared before the bucket is loaded, and the engine's ledger can follow the
push. Each server has its own communicator, with the trainer as rank 0, so a dead server does not block the others. The
trainer's side is `rollout.nccl_push`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from oblr_megatron.engine.transfer import RestartableReload, ShmUpdateInfo
from oblr_megatron.errors import RunError, WeightError
from oblr_megatron.runtime.collectives import attempt, raise_on_all
from oblr_megatron.weights.device_buffer import device_checksum
from oblr_megatron.weights.shm import compare_checksums


@dataclass(kw_only=True)
class NcclInitInfo(NCCLWeightTransferInitInfo):
    """vLLM's rendezvous, and the most seconds that the trainer may take for a bucket."""

    seconds: float


class CheckedNcclWeightTransferEngine(RestartableReload, NCCLWeightTransferEngine):
    """Receives each bucket by a broadcast, checks it, and loads it through vLLM's layer-wise reload."""

    init_info_cls = NcclInitInfo  # type: ignore[assignment]
    update_info_cls = ShmUpdateInfo  # type: ignore[assignment]

    def init_transfer_engine(self, init_info: NcclInitInfo) -> None:  # type: ignore[override]
        """Join the trainer's communicator. One left from another trainer, or from before a failure, is dropped.

        Raises:
            RunError: it could not. The network is the likely cause, so the engine goes on.
        """
        self.shutdown()
        self._seconds = init_info.seconds
        try:
            super().init_transfer_engine(init_info)
        except Exception as error:  # any error: a rendezvous has many
            raise RunError(f"it could not join the trainer: {str(error) or type(error).__name__}") from error

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:  # type: ignore[override]
        """Receive a bucket from the trainer, check it, and load its tensors.

        If a worker of the engine cannot use what it received, none loads: a quantized load reduces over all of them.

        Raises:
            RunError: they did not come in time. The trainer has given up before, and opens another communicator.
            DamagedError: the bytes differ from those that were sent, here or at another worker.
            WeightError: a tensor comes in pieces, which the reload cannot load.
        """
        if self.model_update_group is None:
            raise WeightError("there is no communicator with the trainer")
        received = torch.empty(update_info.used, dtype=torch.uint8, device=self.device)
        self.model_update_group.broadcast(received, src=0, stream=torch.cuda.current_stream())
        workers = get_tp_group().cpu_group if self.parallel_config.world_size > 1 else None
        raise_on_all(attempt(lambda: self._complete(received, update_info)), workers)
        model: Any = self.model
        model.load_weights(_tensors(update_info, received))

    def _complete(self, received: Tensor, update_info: ShmUpdateInfo) -> None:
        """Wait for the broadcast, and compare the checksum."""
        self._wait()
        if update_info.checksum is not None:
            compare_checksums(device_checksum(received), update_info.checksum, update_info.bucket().parts)

    def _wait(self) -> None:
        """Wait for the broadcast. Its kernel never ends if the trainer is gone, unless the communicator is aborted."""
        done, end = torch.cuda.Event(), time.monotonic() + self._seconds
        done.record()
        while not done.query():
            if time.monotonic() > end:
                self.shutdown()
                raise RunError(f"the trainer sent no bucket for {self._seconds:g} s")
            time.sleep(1e-4)


def _tensors(update_info: ShmUpdateInfo, received: Tensor) -> list[tuple[str, Tensor]]:
    """The bucket's tensors, as views of the received bytes."""
    bucket = update_info.bucket()
    tensors = []
    for part, offset in zip(bucket.parts, bucket.offsets, strict=True):
        if part.count != part.spec.numel:
            raise WeightError(f"{part} came in pieces")
        elements = received[offset : offset + part.num_bytes].view(part.spec.torch_dtype)
        tensors.append((part.spec.name, elements.view(part.spec.shape)))
    return tensors
