"""Count the bytes of live tensors, to check memory estimates.

    live = LiveBytes()
    with biases_uncounted(), live:
        step()
    live.peak

Every storage that an operator creates counts until it is freed. Workspace inside a kernel and memory that an allocator
caches are not seen. Operators run slower while they are watched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from oblr_megatron.model.cpu import attention


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages created inside the context: `now`, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        weakref.finalize(storage, self._drop, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@contextmanager
def biases_uncounted() -> Iterator[None]:
    """Hide torch's causal bias from `LiveBytes`: torch cannot create it while operators are watched."""
    original: Callable[..., Any] = attention.causal_lower_right

    def unwatched(*sizes: int) -> Any:
        with _disable_current_modes():
            return original(*sizes)

    attention.causal_lower_right = unwatched
    try:
        yield
    finally:
        attention.causal_lower_right = original
