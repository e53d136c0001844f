"""The trainer's side of `oblr_ipc`: buckets go from a rank's GPU to its own engine. Not yet run on a GPU.

vLLM's sender copies each bucket into one buffer of the GPU, which it exports once for each push. torch keeps an
exported buffer until a receiver has opened and released it. If the engine fails before the first bucket, nothing is
exported here. If it dies later, the buffer stays until this process ends. The same holds for the other ranks of an
engine on several GPUs, because they learn of the failure after the push.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.base import WeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerWeightTransferEngine


class IpcSender(IPCTrainerWeightTransferEngine):
    """vLLM's sender, which exports nothing for an engine that has failed already."""

    client: Any  # the `push.Receiver`

    def _send_packed(self, source: WeightSource) -> None:
        if self.client.error is None:
            super()._send_packed(source)
            return
        used = 0  # bytes in the bucket, by vLLM's rule: the other ranks wait for this one at the end of each
        for _, tensor in source:
            if used and used + tensor.nbytes > self.packed_buffer_size_bytes:
                self._end_bucket()
                used = 0
            used += tensor.nbytes
        if used:
            self._end_bucket()

    def _end_bucket(self) -> None:
        self._all_gather_and_merge_handles([{}])
        self._post_send_sync()
