"""A buffer for buckets in GPU memory, and a checksum that a GPU computes.

The bytes are read as 64-bit words x_0 ... x_(n-1); y_j are the up to seven bytes after the last whole word:

    checksum = sum_i (2 i + 1) x_i + sum_j (2 (n + j) + 1) y_j   modulo 2^64;   0 for no bytes

All factors are odd, so changing one word changes the sum. Swapping two words changes it unless they differ only in the
top bits. The checksum finds accidental damage, not manipulation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oblr_megatron.weights.shm import SharedBuffer

WORD = 8
_CHUNK_BYTES = 2**24
"""Bytes of a bucket that are read at once: the factors take as much memory again."""


class DeviceBuffer(SharedBuffer):
    """A `SharedBuffer` in the memory of one device, for `fill_buckets`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(fd=-1)
        self._view = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, size: int) -> None:
        """Make it at least this large; its contents are lost."""
        if self._view.numel() < size:
            self._view = torch.empty(size, dtype=torch.uint8, device=self._view.device)

    def checksum(self, start: int, used: int) -> int:
        return device_checksum(self._view[start : start + used])


def device_checksum(data: Tensor) -> int:
    """The checksum that the module defines, of [n] uint8 on any device that start at a multiple of eight bytes.

    Example: bytes 1, 0 ... (one word, 1) and then 2 -> 1 * 1 + 3 * 2 = 7
    """
    whole = data.numel() // WORD * WORD
    words, rest = data[:whole].view(torch.int64), data[whole:].to(torch.int64)
    total, first = words.new_zeros(()), 0
    for values in (*words.split(_CHUNK_BYTES // WORD), rest):
        factors = torch.arange(first, first + values.numel(), dtype=torch.int64, device=data.device).mul_(2).add_(1)
        total += factors.mul_(values).sum()
        first += values.numel()
    return int(total) % 2**64
