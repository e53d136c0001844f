"""Extra gradients in the layout of megatron's gradient buffers, so that adding one takes a few long vector sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.model.tapped import TappedModel

CACHED = 2**18  # elements that fit in a CPU's cache while every gradient is added to them


class GradientBuffer:
    """One gradient of all of this rank's parameters.

    Args:
        model: layout, dtype and device are those of its gradient buffers.
    """

    def __init__(self, model: TappedModel) -> None:
        self.flats: list[list[Tensor]] = []  # [model chunk][megatron buffer]
        self.views: dict[int, Tensor] = {}  # id of the parameter -> view of its shape
        for chunk in model.chunks:
            flats = []
            for buffer in megatron_buffers(chunk):
                flat = torch.zeros_like(buffer.grad_data)  # nothing writes to the padding between parameters
                flats.append(flat)
                for parameter, (start, end, _) in buffer.param_index_map.items():
                    self.views[id(parameter)] = flat[start:end].view(parameter.shape)
            self.flats.append(flats)


def megatron_buffers(chunk: Any) -> list[Any]:
    """All gradient buffers of a data-parallel wrapper: dense and expert parameters."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def add_weighted(policy: TappedModel, gradients: Sequence[GradientBuffer], coefficients: Sequence[float]) -> None:
    """main_grad += sum_i c_i gradient_i; gradients with c = 0 are not read."""
    used = [(gradient, factor) for gradient, factor in zip(gradients, coefficients, strict=True) if factor != 0]
    for index, chunk in enumerate(policy.chunks):
        for number, buffer in enumerate(megatron_buffers(chunk)):
            parts = [(gradient.flats[index][number], factor) for gradient, factor in used]
            step = CACHED if buffer.grad_data.device.type == "cpu" else max(1, len(buffer.grad_data))
            for start in range(0, len(buffer.grad_data), step):
                target = buffer.grad_data[start : start + step]
                for flat, factor in parts:
                    target.add_(flat[start : start + step], alpha=factor)
