"""What a push is made of, and whether it is the whole of it: names, dtypes and shapes, checked on the engine's side.

Every push declares its manifest, which must be exactly the tensors of the checkpoint that the engine started from, in
the engine's dtype; every bucket must then be the next stretch of that manifest, and the last one must reach its end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from oblr_megatron.errors import WeightError


class Source(Protocol):
    """What a push needs of vLLM's `WeightSource`: Hugging Face names, whole tensors, the same order on every rank."""

    def metadata(self) -> Sequence[Any]:
        """(name, dtype, shape) of every tensor that iteration yields, in that order."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


@runtime_checkable
class ViewSource(Protocol):
    """A source that can do without copies of its own; see `MegatronWeights.views`."""

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors' elements in row-major order, in any number of dimensions and any dtype, each until the next."""
        ...


def views_of(source: Source) -> Iterator[tuple[str, Tensor]]:
    """What to copy from: a source's views where it has them, its tensors where not."""
    return source.views() if isinstance(source, ViewSource) else iter(source)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a push. Example: TensorSpec("model.norm.weight", "float32", (1024,))"""

    name: str
    dtype: str  # torch's name without "torch."
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: Iterable[int]) -> TensorSpec:
        """From torch's own description."""
        return cls(name, str(dtype).removeprefix("torch."), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.numel * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a tensor's elements in row-major order; a tensor that one bucket does not hold comes in several.

    Example: Part(TensorSpec("model.embed_tokens.weight", "bfloat16", (151936, 1024)), first=8388608, count=8388608)
    """

    spec: TensorSpec
    first: int
    count: int

    @classmethod
    def whole(cls, spec: TensorSpec) -> Part:
        """All of a tensor."""
        return cls(spec, 0, spec.numel)

    @property
    def num_bytes(self) -> int:
        """Bytes of the stretch."""
        return self.count * self.spec.torch_dtype.itemsize

    def __str__(self) -> str:
        stretch = "" if self.count == self.spec.numel else f", {self.count} elements from {self.first} on"
        return f"{self.spec}{stretch}"


Manifest = tuple[TensorSpec, ...]


def manifest_of(source: Source) -> Manifest:
    """What a source declares."""
    return tuple(TensorSpec.of(meta.name, meta.dtype, meta.shape) for meta in source.metadata())


def check_manifest(manifest: Manifest, model: Mapping[str, tuple[int, ...]], dtype: str | None = None) -> None:
    """Refuse a manifest that is not exactly the model's tensors.

    Args:
        manifest: of the push.
        model: names and shapes that the engine holds.
        dtype: that the engine holds them in; None where it is not known.

    Raises:
        WeightError: naming the first tensors that are missing, unknown, doubled, of another shape or dtype.
    """
    counts = Counter(spec.name for spec in manifest)
    known = [spec for spec in manifest if spec.name in model]
    problems = [
        ("missing", [name for name in model if name not in counts]),
        ("not in the model", [name for name in counts if name not in model]),
        ("given twice", [name for name, count in counts.items() if count > 1]),
        (
            "of another shape",
            [
                f"{spec.name} {list(spec.shape)}, the model has {list(model[spec.name])}"
                for spec in known
                if spec.shape != model[spec.name]
            ],
        ),
        (
            "of another dtype",
            [f"{spec.name} {spec.dtype}, the model has {dtype}" for spec in known if dtype not in (None, spec.dtype)],
        ),
    ]
    found = [
        f"{_first(tensors)} {'is' if len(tensors) == 1 else 'are'} {what}" for what, tensors in problems if tensors
    ]
    if found:
        raise WeightError("the push does not match the model: " + "; ".join(found))


class Ledger:
    """Follows one push: what has come, and what is still owed."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._taken = 0  # whole tensors
        self._next = 0  # element of the tensor after them

    def take(self, parts: Sequence[Part]) -> None:
        """Enter a bucket, which must hold the next stretches of the manifest.

        Raises:
            WeightError: it holds something else.
        """
        for part in parts:
            owed = self._manifest[self._taken] if self._taken < len(self._manifest) else None
            end = part.first + part.count
            if part.spec != owed or part.first != self._next or not part.first <= end <= owed.numel:
                place = f" from element {self._next} on" if owed and self._next else ""
                raise WeightError(f"the push sent {part} where its manifest has {owed or 'nothing more'}{place}")
            done = end == owed.numel
            self._taken, self._next = (self._taken + 1, 0) if done else (self._taken, end)

    def finish(self) -> None:
        """Refuse to end before every tensor has come.

        Raises:
            WeightError: naming the first that is missing.
        """
        owed = [spec.name for spec in self._manifest[self._taken :]]
        if owed:
            raise WeightError(f"the push ended without {'the rest of ' if self._next else ''}{_first(owed)}")


def _first(names: Sequence[str], count: int = 3) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest
