"""Let the C library keep freed memory from one microbatch to the next.

glibc returns the free end of its heap to the system when that end exceeds a threshold. The next microbatch allocates it
again, and each page of 4 KiB costs a page fault. A training step frees and allocates all its activations, so a rank on
a CPU has thousands of page faults a step. With a higher threshold the pages stay.

Only for processes without CUDA: on a GPU torch's own allocator keeps the memory of tensors.
"""

from __future__ import annotations

import ctypes
import os

KEPT = 2**28  # bytes that a process may keep free at the end of its heap
MAPPED = 2**25  # bytes from which a block is mapped on its own and returned when freed; glibc allows no more
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of glibc's mallopt
_USERS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"}


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds; returns whether they changed. Settings of the user in the environment stay.

    Without the second threshold, the first one would turn off glibc's own adjustment and leave it at 128 KiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None or os.environ.keys() & _USERS:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, MAPPED)) and bool(mallopt(_TRIM_THRESHOLD, KEPT))
