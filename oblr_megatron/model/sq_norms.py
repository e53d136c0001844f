"""Sums of squares in fp64, without an fp64 copy of a whole gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oblr_megatron.memory.buffer_sizes import CPU_SQUARE_CHUNK, GPU_SQUARE_CHUNK

if TYPE_CHECKING:
    from torch import Tensor


def sq_norm(flat: Tensor) -> Tensor:
    """Sum of squares of a [n] tensor of any floating dtype, as an fp64 scalar on its device."""
    size = _chunk(flat)
    if len(flat) <= size:
        wide = flat.to(torch.float64)
        return torch.dot(wide, wide)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    # One scratch tensor for all chunks: allocating fresh pages would cost more than the sum.
    scratch = None if flat.dtype == torch.float64 else total.new_empty(size)
    for chunk in flat.split(size):
        wide = chunk if scratch is None else scratch[: len(chunk)].copy_(chunk)
        total += torch.dot(wide, wide)
    return total


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Inner product of two [n] tensors of one floating dtype, as an fp64 scalar on their device."""
    total = torch.zeros((), dtype=torch.float64, device=left.device)
    for one, other in zip(left.split(_chunk(left)), right.split(_chunk(left)), strict=True):
        total += torch.dot(one.double(), other.double())
    return total


def row_sq_norms(rows: Tensor) -> Tensor:
    """Sum of squares of each row: [n, P] -> [n] fp64."""
    if not rows.numel():
        return torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    return torch.stack([sq_norm(row) for row in rows])


def row_dots(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of corresponding rows: [r, h] x [r, h] -> [r] fp64."""
    step = max(1, _chunk(left) // max(1, left.shape[1]))
    out = torch.empty(len(left), dtype=torch.float64, device=left.device)
    for start in range(0, len(left), step):
        part = slice(start, start + step)
        out[part] = (left[part].to(torch.float64) * right[part].to(torch.float64)).sum(dim=1)
    return out


def _chunk(tensor: Tensor) -> int:
    """Elements that are converted at a time on the tensor's device."""
    return GPU_SQUARE_CHUNK if tensor.is_cuda else CPU_SQUARE_CHUNK
