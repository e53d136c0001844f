"""`weights.verify`: compares the weights in an engine's own parameters after a push with the trainer's.

Both sides compute digests of tensors. The trainer gathers its weights once more for this, so the check covers every
step of a push: buckets, memory, loader and the table of names. It is slow, and works for every transport.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import xxhash
from torch import Tensor, nn

from oblr_megatron.padding import VOCABULARY_MULTIPLE
from oblr_megatron.weights.adapter import AdapterShape, adapter_table
from oblr_megatron.weights.engine_view import engine_tensors
from oblr_megatron.weights.names import Entry, ModelShape, table

Digests = dict[str, str]
"""Hugging Face name -> digest of a worker's part of that tensor."""


def digest(tensor: Tensor) -> str:
    """xxh3 of a tensor's bytes in row-major order."""
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(data.numpy().data)


def read_back(model: nn.Module) -> Digests:
    """Digests of every tensor in a vLLM worker's model."""
    return {name: digest(tensor) for name, tensor in engine_tensors(model).items()}


def expected_digests(
    source: Iterable[tuple[str, Tensor]],
    shape: ModelShape,
    sizes: Collection[int],
    adapter: AdapterShape | None = None,
) -> dict[int, list[Digests]]:
    """The digests that the workers of tensor-parallel engines should have. Iterates the source once.

    Args:
        source: whole tensors, as they were pushed; may be collective.
        shape: the model's sizes.
        sizes: numbers of workers of an engine; 1 without tensor parallelism.
        adapter: if the source may be an adapter.

    Returns:
        Number of workers -> the digests of each, by rank.
    """
    cuts = {name: (item, part) for item in table(shape) for part, name in enumerate(item.hf)}
    if adapter is not None:
        cuts |= {one.name: (one.item, one.part) for one in adapter_table(shape, adapter)}
    by_size: dict[int, list[Digests]] = {workers: [{} for _ in range(workers)] for workers in sizes}
    for name, tensor in source:
        item, part = cuts[name]
        for workers, digests in by_size.items():
            for worker, own in enumerate(digests):
                own[name] = digest(worker_part(item, part, tensor, shape, worker, workers))
    return by_size


def worker_part(item: Entry, part: int, tensor: Tensor, shape: ModelShape, worker: int, workers: int) -> Tensor:
    """The rows or columns of a whole tensor that vLLM gives number `worker` of its tensor-parallel workers.

    `part` is the index of the tensor in the parameter, e.g. 1 for k. With more workers than KV groups, neighbours hold
    the same k and v.
    """
    if item.cut == "replicated":
        return tensor
    if item.cut == "columns":
        return tensor.chunk(workers, dim=1)[worker]
    if item.cut == "vocab":
        rows = -(-shape.vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // workers
        return tensor[rows * worker : rows * (worker + 1)]
    pieces = min(workers, shape.groups) if item.cut == "qkv" and part > 0 else workers
    return tensor.chunk(pieces)[worker * pieces // workers]


def first_difference(expected: Sequence[Digests], actual: Sequence[Mapping[str, str]]) -> str | None:
    """The first tensor, in the order of the push, that differs in a worker; None if all agree.

    Example: "model.layers.3.self_attn.k_proj.weight of worker 1"
    """
    names = list(expected[0]) + sorted({name for worker in actual for name in worker} - expected[0].keys())
    for name in names:
        for rank, (sent, held) in enumerate(zip(expected, actual, strict=True)):
            if sent.get(name) != held.get(name):
                return f"{name} of worker {rank}" if len(expected) > 1 else name
    return None
