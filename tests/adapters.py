"""Random LoRA adapters of tiny models, and the models that they define."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from oblr_megatron.checkpoint.peft_dir import write_adapter
from oblr_megatron.families import MATRICES
from oblr_megatron.weights.adapter import PREFIX, A, AdapterShape, B, adapter_table
from oblr_megatron.weights.export import TensorMeta
from oblr_megatron.weights.names import read_shape

ALL = MATRICES


class Adapter:
    """Random A and B as a source."""

    def __init__(self, base: Path, rank: int, targets: tuple[str, ...], seed: int) -> None:
        self.base, self.shape = base, AdapterShape(rank, targets)
        draw = torch.Generator().manual_seed(seed)
        table = adapter_table(read_shape(base), self.shape)
        self.tensors = {one.name: 0.3 * torch.randn(one.shape, generator=draw) for one in table}

    def metadata(self) -> list[Any]:
        return [SimpleNamespace(name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()


def merged(base: Path, adapter: Adapter, alpha: float) -> PreTrainedModel:
    """W + alpha / rank B A, in fp64."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, a in adapter.tensors.items():
            if name.endswith(A):
                b = adapter.tensors[name.removesuffix(A) + B]
                weight = model.get_submodule(name.removeprefix(PREFIX).removesuffix(A)).weight
                weight.copy_(weight.double() + alpha / adapter.shape.rank * b.double() @ a.double())
    return model


def write(adapter: Adapter, target: Path, alpha: float) -> None:
    """As a directory in PEFT's format."""
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in adapter.tensors.items()]
    write_adapter(iter(adapter), metas, target, adapter.shape, alpha=alpha, base=str(adapter.base))
