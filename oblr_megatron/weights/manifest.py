"""What a push is made of, and whether it is the whole of it: names, dtypes and shapes, checked on the engine's side.

The first push declares its manifest, which must be exactly the tensors of the checkpoint that the engine started from;
every bucket of every push must then be the next tensors of that manifest, and the last one must be among them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from oblr_megatron.errors import RunError

OUTPUT_LAYER = "lm_head.weight"


class WeightError(RunError):
    """A push is not what the model is made of, or was damaged on the way."""


class Source(Protocol):
    """What a push needs of vLLM's `WeightSource`: Hugging Face names, whole tensors, the same order on every rank."""

    def metadata(self) -> Sequence[Any]:
        """(name, dtype, shape) of every tensor that iteration yields, in that order."""
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
        """From torch's own description."""
        return cls(name, str(dtype).removeprefix("torch."), tuple(shape))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


Manifest = tuple[TensorSpec, ...]


def manifest_of(source: Source) -> Manifest:
    """What a source declares."""
    return tuple(TensorSpec.of(meta.name, meta.dtype, meta.shape) for meta in source.metadata())


def checkpoint_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Hugging Face directory's tensors, from the headers of its safetensors files.

    An output layer that is stored although the model ties it to the embedding is left out: no engine holds it.
    """
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    if json.loads((path / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings"):
        shapes.pop(OUTPUT_LAYER, None)
    return shapes


def check_manifest(manifest: Manifest, model: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a manifest that is not exactly the model's tensors.

    Raises:
        WeightError: naming the first tensors that are missing, unknown, doubled or of another shape.
    """
    counts = Counter(spec.name for spec in manifest)
    problems = [
        ("missing", [name for name in model if name not in counts]),
        ("not in the model", [name for name in counts if name not in model]),
        ("given twice", [name for name, count in counts.items() if count > 1]),
        (
            "of another shape",
            [
                f"{spec.name} {list(spec.shape)}, the model has {list(model[spec.name])}"
                for spec in manifest
                if spec.name in model and spec.shape != model[spec.name]
            ],
        ),
    ]
    found = [
        f"{_first(tensors)} {'is' if len(tensors) == 1 else 'are'} {what}" for what, tensors in problems if tensors
    ]
    if found:
        raise WeightError("the push does not match the model: " + "; ".join(found))


class Ledger:
    """Follows one push: which tensors have come, and which are still owed."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._taken = 0

    def take(self, specs: Sequence[TensorSpec]) -> None:
        """Enter a bucket, which must hold the next tensors of the manifest.

        Raises:
            WeightError: it holds something else.
        """
        for spec in specs:
            owed = self._manifest[self._taken] if self._taken < len(self._manifest) else None
            if spec != owed:
                raise WeightError(f"the push sent {spec} where its manifest has {owed or 'nothing more'}")
            self._taken += 1

    def finish(self) -> None:
        """Refuse to end before every tensor has come.

        Raises:
            WeightError: naming the first that is missing.
        """
        owed = [spec.name for spec in self._manifest[self._taken :]]
        if owed:
            raise WeightError(f"the push ended without {_first(owed)}")


def _first(names: Sequence[str], count: int = 3) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest
