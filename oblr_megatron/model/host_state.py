"""Moves the optimizer's fp32 masters and moments to host memory and back (`optimizer.offload`).

    state = HostState(optimizer.chained_optimizers, device)
    state.to_host()         # the device's memory is free; a checkpoint reads the copies
    state.to_device()       # before an update

Each tensor keeps its identity; only its memory is exchanged. megatron-core's own `offload_to_cpu` is not used: it moves
fp32 weights too, and allocates host memory that is not pinned at every call. Host memory stays allocated, because
pinning it again is slow. On a CPU both places are ordinary memory, of which only one is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Key = tuple[int, int, str]
"""Number of the optimizer, of its tensor, and what of it. Example: (0, 3, "exp_avg")"""


class HostState:
    """The state of megatron-core's optimizers on this rank, on the device or in host memory."""

    def __init__(self, parts: Sequence[Any], device: torch.device) -> None:
        """Take megatron-core's optimizers, with or without state; what they create later is moved too."""
        self._parts, self._device = parts, device
        self._pinned = device.type == "cuda"
        self._host: dict[Key, Tensor] = {}  # kept between moves if pinned
        self.away = False

    def to_host(self) -> None:
        """Copy the state to host memory and free the device's. torch's allocator may keep it until `empty_cache`."""
        if self.away:
            return
        for key, tensor in self.tensors():
            if key not in self._host:
                self._host[key] = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned)
            self._host[key].copy_(tensor, non_blocking=True)
            tensor.data = self._host[key]  # freed memory is reused in the order of the stream, after the copy
        self._end()
        self.away = True

    def to_device(self) -> None:
        """Copy the state back."""
        if not self.away:
            return
        for key, tensor in self.tensors():
            tensor.data = torch.empty_like(tensor, device=self._device).copy_(tensor, non_blocking=True)
            if not self._pinned:
                self._host.pop(key, None)
        self._end()
        self.away = False

    def tensors(self) -> Iterator[tuple[Key, Tensor]]:
        """fp32 masters of bf16 weights, and moments; not step counts, nor weights that are updated in place."""
        for number, part in enumerate(self._parts):
            # fp32 copies of half-precision weights: of the distributed optimizer, or of the plain one
            groups = getattr(part, "shard_fp32_from_float16_groups", getattr(part, "fp32_from_float16_groups", []))
            masters = {id(main) for group in groups for main in group}
            updated = [main for group in part.optimizer.param_groups for main in group["params"]]
            for index, main in enumerate(updated):
                if id(main) in masters:
                    yield (number, index, "master"), main
                for name, tensor in part.optimizer.state.get(main, {}).items():
                    if isinstance(tensor, Tensor) and tensor.ndim:
                        yield (number, index, name), tensor

    def _end(self) -> None:
        if self._pinned:
            torch.cuda.synchronize(self._device)
