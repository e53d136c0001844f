"""The tensors of a push, and the engine's check that all of them come, in order. Imports no torch.

A push declares its manifest: exactly the tensors of the checkpoint that the engine started from, in the engine's dtype.
Each bucket must continue where the previous one ended, and the last bucket must reach the end of the manifest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from oblr_megatron.errors import WeightError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Source(Protocol):
    """Whole tensors under Hugging Face names, in the same order on every rank; vLLM's `WeightSource` is one.

    A source may also have `views`, see `MegatronWeights.views`.
    """

    def metadata(self) -> Sequence[Any]:
        """(name, dtype, shape) of every tensor, in the order of iteration."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a push. Example: TensorSpec("model.norm.weight", "float32", (1024,))"""

    name: str
    dtype: str  # torch's name without "torch."
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: Iterable[int]) -> TensorSpec:
        """A spec from torch's dtype and shape."""
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
        """torch's dtype."""
        import torch  # here, so that the state of an engine can be used and tested without torch

        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive elements of a tensor in row-major order; a tensor larger than a bucket comes in several parts.

    Example: Part(TensorSpec("model.embed_tokens.weight", "bfloat16", (151936, 1024)), first=8388608, count=8388608)
    """

    spec: TensorSpec
    first: int
    count: int

    @classmethod
    def whole(cls, spec: TensorSpec) -> Part:
        """The part that holds all of a tensor."""
        return cls(spec, 0, spec.numel)

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.count * self.spec.torch_dtype.itemsize

    def __str__(self) -> str:
        if self.count == self.spec.numel:
            return str(self.spec)
        return f"{self.spec}, {self.count} elements from {self.first} on"


Manifest = tuple[TensorSpec, ...]


def manifest_of(source: Source) -> Manifest:
    """The tensors that a source declares."""
    return tuple(TensorSpec.of(meta.name, meta.dtype, meta.shape) for meta in source.metadata())


def parts_of(update_info: Mapping[str, Any]) -> tuple[Part, ...]:
    """The parts in one weight update, of our backends (`Bucket.update_info`) or of vLLM's IPC backend.

    vLLM's IPC backend has no "firsts" and "counts": it sends whole tensors.
    """
    fields = (update_info["names"], update_info["dtype_names"], update_info["shapes"])
    specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in zip(*fields, strict=True)]
    if "firsts" not in update_info:
        return tuple(map(Part.whole, specs))
    return tuple(map(Part, specs, update_info["firsts"], update_info["counts"]))


def check_manifest(manifest: Manifest, model: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """Refuse a manifest that is not exactly the model's tensors.

    Args:
        manifest: of the push.
        model: name -> shape of the engine's tensors.
        dtype: of the engine's tensors.

    Raises:
        WeightError: names the first tensors that are missing, unknown, given twice, or of another shape or dtype.
    """
    counts = Counter(spec.name for spec in manifest)
    known = [spec for spec in manifest if spec.name in model]
    problems = {
        "missing": [name for name in model if name not in counts],
        "not in the model": [name for name in counts if name not in model],
        "given twice": [name for name, count in counts.items() if count > 1],
        "of another shape": [
            f"{spec.name} {list(spec.shape)}, the model has {list(model[spec.name])}"
            for spec in known
            if spec.shape != model[spec.name]
        ],
        "of another dtype": [
            f"{spec.name} {spec.dtype}, the model has {dtype}" for spec in known if dtype != spec.dtype
        ],
    }
    lines = [
        f"{_first(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in problems.items() if names
    ]
    if lines:
        raise WeightError("the push does not match the model: " + "; ".join(lines))


class Ledger:
    """Progress of one push along its manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._taken = 0  # whole tensors that have come
        self._next = 0  # the next element of the tensor after them

    def count(self, parts: Sequence[Part]) -> None:
        """Count a bucket.

        Raises:
            WeightError: the bucket does not continue the manifest.
        """
        for part in parts:
            missing = self._manifest[self._taken] if self._taken < len(self._manifest) else None
            end = part.first + part.count
            if part.spec != missing or part.first != self._next or not part.first <= end <= missing.numel:
                place = f" from element {self._next} on" if missing and self._next else ""
                raise WeightError(f"the push sent {part} where its manifest has {missing or 'nothing more'}{place}")
            done = end == missing.numel
            self._taken, self._next = (self._taken + 1, 0) if done else (self._taken, end)

    def finish(self) -> None:
        """Check that every tensor has come.

        Raises:
            WeightError: names the first tensors that have not.
        """
        missing = [spec.name for spec in self._manifest[self._taken :]]
        if missing:
            raise WeightError(f"the push ended without {'the rest of ' if self._next else ''}{_first(missing)}")


def _first(names: Sequence[str], count: int = 3) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest
