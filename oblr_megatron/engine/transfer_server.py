"""`oblr_server_shm`: a push through shared memory into an API server on the same machine.

The server is not a child of the trainer, so it finds the memory through `PeerMemory`.
"""

from __future__ import annotations

from typing import Any

from oblr_megatron.engine.transfer import ShmWeightTransferEngine, check_layers_read_parameters
from oblr_megatron.weights.peer_memory import PeerMemory


class ServerShmWeightTransferEngine(ShmWeightTransferEngine):
    """Differs from `oblr_shm` only in how the memory is found."""

    init_info_cls = PeerMemory  # type: ignore[assignment]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._peer: PeerMemory | None = None

    def init_transfer_engine(self, init_info: PeerMemory) -> None:  # type: ignore[override]
        """Map the trainer's memory; again after it grew or the trainer changed."""
        check_layers_read_parameters(self.model)
        if self._peer != init_info:
            self.shutdown()
            self._buffer = init_info.open()
            self._peer = init_info
        assert self._buffer is not None, "opened above"
        self._buffer.map()

    def shutdown(self) -> None:
        """Unmap the memory."""
        super().shutdown()
        self._peer = None
