"""LoRA adapters (arXiv 2106.09685) under PEFT's names: the tensors that a push and an export hold. Imports no torch.

y = W x + (alpha / rank) B (A x)          W [out, in] is frozen;  A [rank, in],  B [out, rank]

W   model.layers.0.self_attn.q_proj.weight
A   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
B   base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from oblr_megatron.families import MATRICES
from oblr_megatron.weights.names import Entry, ModelShape, table

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.weights.manifest import Source

PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Rank and adapted matrices. Example: AdapterShape(16, ("q_proj", "k_proj", "v_proj", "o_proj"))"""

    rank: int
    targets: tuple[str, ...]  # last parts of the names of adapted matrices

    @classmethod
    def of(cls, text: str) -> AdapterShape:
        """From its `str`; a ValueError if it has another form. Example: "16:q_proj,v_proj", in any order."""
        rank, _, names = text.partition(":")
        targets = names.split(",")
        if not rank.isdecimal() or int(rank) == 0 or not set(targets) <= set(MATRICES):
            raise ValueError(f"{text!r} is not RANK:TARGETS with targets of {', '.join(MATRICES)}")
        return cls(int(rank), tuple(target for target in MATRICES if target in targets))  # a run's config sorts alike

    def __str__(self) -> str:
        return f"{self.rank}:{','.join(self.targets)}"


class AdapterTensor(NamedTuple):
    """One matrix of an adapter.

    Example, of q: AdapterTensor("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", (2048, 16), item, 0),
    where `item.cut` is "qkv"; that of the A next to it is "replicated".
    """

    name: str
    shape: tuple[int, int]
    item: Entry  # the base's parameter, cut over tensor-parallel ranks as this matrix is
    part: int  # the matrix's place in `item.hf`


def adapter_table(shape: ModelShape, adapter: AdapterShape) -> Iterator[AdapterTensor]:
    """The tensors of an adapter, in the order of the base's: of each matrix A, then B."""
    for item in table(shape):
        inside = item.cut == "columns"  # a rank holds columns of W, so all of B and columns of A
        for part, (name, size) in enumerate(zip(item.hf, item.shapes, strict=True)):
            module = PREFIX + name.removesuffix(".weight")
            if len(size) == 2 and module.rpartition(".")[2] in adapter.targets:
                rows, columns = size
                whole = replace(item, cut="replicated")
                cut = item if item.expert is None else whole
                yield AdapterTensor(module + A, (adapter.rank, columns), cut if inside else whole, part)
                yield AdapterTensor(module + B, (rows, adapter.rank), whole if inside else cut, part)


def adapter_shapes(shape: ModelShape, adapter: AdapterShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of an adapter's tensors."""
    return {one.name: one.shape for one in adapter_table(shape, adapter)}


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter as a source of pushes: A, and B times alpha / rank.

    Engines must hold the base before: they ask for it after a start, and after a sleep that dropped the weights.
    """

    adapter: Source
    base: Source
    scale: float  # alpha / rank

    def metadata(self) -> Sequence[Any]:
        """See `Source`."""
        return self.adapter.metadata()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.adapter:
            yield name, tensor * self.scale if name.endswith(B) else tensor
