"""Access of a server on the same machine to the trainer's anonymous memory: through /proc/PID/fd/N. Imports no vllm.

The memory has no name in /dev/shm and is freed when both sides have ended. The server opens nothing else: the
descriptor must be a memfd with our name, and the machine, the PID namespace and the inode must be those that the
trainer sent.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from oblr_megatron.errors import WeightError
from oblr_megatron.runtime.processes import boot_id, pid_namespace
from oblr_megatron.weights.shm import SharedBuffer

MEMORY_NAME = "/memfd:oblr-weights"


@dataclass
class PeerMemory:
    """Where the trainer holds the memory.

    Example: PeerMemory(pid=4711, fd=9, inode=1043, boot_id="3f1c...", pid_namespace="pid:[4026531836]")
    """

    pid: int
    fd: int
    inode: int
    boot_id: str
    pid_namespace: str

    @classmethod
    def of(cls, buffer: SharedBuffer) -> PeerMemory:
        """Address by which another process finds a buffer of this process."""
        inode = os.fstat(buffer.fd).st_ino
        return cls(os.getpid(), buffer.fd, inode, boot_id(), f"pid:[{pid_namespace()}]")

    def open(self) -> SharedBuffer:
        """Map the memory.

        Raises:
            WeightError: it cannot be opened; the message says why.
        """
        if (boot_id(), f"pid:[{pid_namespace()}]") != (self.boot_id, self.pid_namespace):
            raise WeightError(
                "the trainer runs on another machine or in another container, and a server without GPUs takes weights "
                "through shared memory. Fix: start the server where rank 0 of the trainer runs"
            )
        path = Path(f"/proc/{self.pid}/fd/{self.fd}")
        try:
            if not os.readlink(path).startswith(MEMORY_NAME):
                raise WeightError(f"{path} is not the memory of a push")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WeightError(
                f"cannot open the trainer's memory at {path}: {error.strerror}. Fix: run server and trainer as one user"
            ) from error
        buffer = SharedBuffer(descriptor)
        if os.fstat(descriptor).st_ino != self.inode:
            buffer.close()
            raise WeightError(f"{path} is not the memory that the trainer sent")
        return buffer
