"""`oblr_nccl`: a push into an API server on GPUs, over vLLM's own NCCL backend. Not yet run on a GPU.

vLLM's engine receives a whole model in one update; this one receives a bucket an update, so that a push needs no more
memory than a bucket beside the model, its checksum is looked at before anything is loaded, and whoever counts what has
come sees it bucket by bucket. The trainer is rank 0 of a communicator of its own for every server: one that dies holds
nobody else up. The trainer's side is `weights.nccl_plane`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from oblr_megatron.engine.transfer import RestartableReload, ShmUpdateInfo
from oblr_megatron.errors import DamagedError, WeightError
from oblr_megatron.weights.device_buffer import device_checksum


class CheckedNcclWeightTransferEngine(RestartableReload, NCCLWeightTransferEngine):
    """Engine side: a broadcast for each bucket, checked, and loaded through vLLM's layer-wise reload."""

    update_info_cls = ShmUpdateInfo  # type: ignore[assignment]

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's communicator; one that is left from another trainer, or before a failure, is given up."""
        self.shutdown()
        super().init_transfer_engine(init_info)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:  # type: ignore[override]
        """Take a bucket from the trainer, check it, load its tensors.

        Raises:
            DamagedError: the bytes are not those that were sent.
            WeightError: a tensor is in pieces, which the reload does not take.
        """
        if self.model_update_group is None:
            raise WeightError("no communicator with the trainer is open")
        received = torch.empty(update_info.used, dtype=torch.uint8, device=self.device)
        self.model_update_group.broadcast(received, src=0, stream=torch.cuda.current_stream())
        if update_info.checksum is not None and (found := device_checksum(received)) != update_info.checksum:
            raise DamagedError(
                f"a bucket's checksum is {found:016x}, the trainer's was {update_info.checksum:016x} "
                f"({update_info.names[0]} ... {update_info.names[-1]})"
            )
        model: Any = self.model
        model.load_weights(_tensors(update_info, received))


def _tensors(update_info: ShmUpdateInfo, received: Tensor) -> list[tuple[str, Tensor]]:
    """The bucket's tensors, as views of what was received."""
    bucket = update_info.bucket()
    tensors = []
    for part, offset in zip(bucket.parts, bucket.offsets, strict=True):
        if part.count != part.spec.numel:
            raise WeightError(f"{part} came in pieces")
        elements = received[offset : offset + part.num_bytes].view(part.spec.torch_dtype)
        tensors.append((part.spec.name, elements.view(part.spec.shape)))
    return tensors
