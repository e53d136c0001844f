"""Copies from host memory to a device that the host does not wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def to_device(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The values on a device. A copy to a GPU comes from pinned memory, in the order of the current stream.

    An ordinary `values.to(device)` waits until the GPU has finished all work before it.
    """
    if device.type == "cuda" and values.device.type == "cpu":
        return values.to(dtype or values.dtype).pin_memory().to(device, non_blocking=True)
    return values.to(device, dtype)
