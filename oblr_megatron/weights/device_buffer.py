"""Where rank 0 gathers buckets in GPU memory, and a checksum that a GPU computes. Pure torch.

The checksum of bytes read as 64-bit words x_0 ... x_(n-1), modulo 2^64:

    sum_i (2 i + 1) x_i + sum_j (2 (n + j) + 1) y_j         y_j: the up to seven bytes after the last whole word

Every weight is odd, so a change of any one word changes the sum, and two words that change places change it unless
they agree in all but the top bits. It finds damage, not malice. Degenerate: no bytes have the sum 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oblr_megatron.weights.shm import SharedBuffer

WORD = 8
_MODULUS = 2**64


class DeviceBuffer(SharedBuffer):
    """The two halves of a push in the memory of one device; what `fill_buckets` asks of a buffer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(fd=-1)
        self._view = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, size: int) -> None:
        """Make it at least this large; what it held is lost."""
        if self._view.numel() < size:
            self._view = torch.empty(size, dtype=torch.uint8, device=self._view.device)

    def map(self) -> None:
        """Nothing to map."""

    def checksum(self, start: int, used: int) -> int:
        """See `device_checksum`."""
        return device_checksum(self._view[start : start + used])


def device_checksum(data: Tensor) -> int:
    """The sum of the module's docstring.

    Args:
        data: [n] uint8, starting at a multiple of eight bytes of its memory, on any device.

    Example: bytes 1, 0 ... (one word, 1) and then 2 -> 1 * 1 + 3 * 2 = 7
    """
    whole = data.numel() // WORD * WORD
    words, rest = data[:whole].view(torch.int64), data[whole:].to(torch.int64)
    values = torch.cat([words, rest])
    weights = 2 * torch.arange(values.numel(), dtype=torch.int64, device=data.device) + 1
    return int((values * weights).sum()) % _MODULUS
