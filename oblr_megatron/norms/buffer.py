"""Extra gradients in the layout of megatron's gradient buffers, so that adding one takes a few long vector sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.memory.buffer_sizes import OFFLOADED_PIECE

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.model.tapped import TappedModel

CACHED = 2**18  # elements that fit in a CPU's cache while every gradient is added to them


class GradientBuffer:
    """One gradient of all of this rank's parameters.

    Args:
        model: the layout is that of its gradient buffers.
        dtype: of the gradient; by default that of `main_grad`.
        device: stores the gradient; host memory is pinned on a machine with a GPU.
    """

    def __init__(
        self, model: TappedModel, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        self.flats: list[list[Tensor]] = []  # [model chunk][megatron buffer]
        self.views: dict[int, Tensor] = {}  # id of the parameter -> view of its shape
        for chunk in model.chunks:
            flats = []
            for buffer in megatron_buffers(chunk):
                flat = _empty(len(buffer.grad_data), dtype or buffer.grad_data.dtype, device or model.parallel.device)
                flats.append(flat)
                for parameter, (start, end, _) in buffer.param_index_map.items():
                    self.views[id(parameter)] = flat[start:end].view(parameter.shape)
            self.flats.append(flats)

    def copy_chunk(self, source: GradientBuffer, chunk: int) -> None:
        """Copy one model chunk's gradient, converted to this buffer's dtype and device."""
        for own, other in zip(self.flats[chunk], source.flats[chunk], strict=True):
            # In pieces: a GPU makes a copy in the other dtype before it copies to pinned memory.
            step = None if own.device == other.device else OFFLOADED_PIECE
            for span in _pieces(len(own), step):
                own[span].copy_(other[span], non_blocking=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return sum(flat.nbytes for flats in self.flats for flat in flats)


def megatron_buffers(chunk: Any) -> list[Any]:
    """All gradient buffers of a data-parallel wrapper: dense and expert parameters."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def add_weighted(policy: TappedModel, gradients: Sequence[GradientBuffer], coefficients: Sequence[float]) -> None:
    """main_grad += sum_i c_i gradient_i; gradients with c = 0 are not read."""
    used = [(gradient, factor) for gradient, factor in zip(gradients, coefficients, strict=True) if factor != 0]
    for index, chunk in enumerate(policy.chunks):
        for number, buffer in enumerate(megatron_buffers(chunk)):
            parts = [(gradient.flats[index][number], factor) for gradient, factor in used]
            step = piece_size(buffer.grad_data.device, [flat.device for flat, _ in parts])
            for span in _pieces(len(buffer.grad_data), step):
                target = buffer.grad_data[span]
                for flat, factor in parts:
                    target.add_(flat[span].to(target.device, non_blocking=True), alpha=factor)


def piece_size(target: torch.device, sources: Sequence[torch.device]) -> int | None:
    """Elements that are added at a time; None for all. Offloaded gradients must not be copied whole to the GPU."""
    if target.type == "cpu":
        return CACHED
    return OFFLOADED_PIECE if any(source.type == "cpu" for source in sources) else None


def _pieces(size: int, step: int | None) -> Iterator[slice]:
    step = step or max(1, size)
    return (slice(start, start + step) for start in range(0, size, step))


def _empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer of zeros: nothing writes to the padding between parameters."""
    pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.zeros(size, dtype=dtype, device=device, pin_memory=pinned)
