"""`weights.verify`: what an engine holds after a push, read back from its own parameters, against what the trainer has.

Both sides digest tensors and exchange digests. The trainer gathers its weights once more for this, so nothing that a
push passes through (bucket, memory, loader, the table of names) is taken on trust; slow, and the same for all ways that
weights travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash
from torch import Tensor, nn

from oblr_megatron.weights.engine_view import engine_tensors
from oblr_megatron.weights.names import Entry, ModelShape, table

VOCAB_MULTIPLE = 64
"""Rows that vLLM pads a vocabulary to a multiple of, before its workers share them."""

Digests = dict[str, str]
"""Hugging Face name -> digest of a worker's part of that tensor."""


def digest(tensor: Tensor) -> str:
    """xxh3 of a tensor's bytes, in row-major order."""
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(data.numpy().data)


def read_back(model: nn.Module) -> Digests:
    """Of every tensor in a vLLM worker's model."""
    return {name: digest(tensor) for name, tensor in engine_tensors(model).items()}


def expected_digests(source: Iterable[tuple[str, Tensor]], shape: ModelShape, workers: int) -> list[Digests]:
    """What the workers of a tensor-parallel engine should hold, by rank. Iterates the source, which may be collective.

    Args:
        source: of whole tensors, as they were pushed.
        shape: the model's sizes.
        workers: of the engine, 1 without tensor parallelism.
    """
    cuts = {name: (item, part) for item in table(shape) for part, name in enumerate(item.hf)}
    found: list[Digests] = [{} for _ in range(workers)]
    for name, tensor in source:
        for worker in range(workers):
            item, part = cuts[name]
            found[worker][name] = digest(worker_part(item, part, tensor, shape, worker, workers))
    return found


def worker_part(item: Entry, part: int, tensor: Tensor, shape: ModelShape, worker: int, workers: int) -> Tensor:
    """The rows or columns of a whole tensor that vLLM gives one of its tensor-parallel workers.

    Args:
        item: the parameter.
        part: which of its tensors, 1 for k.
        tensor: whole.
        shape: the model's sizes.
        worker: rank within the engine.
        workers: how many there are. With more of them than KV groups, neighbours hold the same group's k and v.
    """
    if item.cut == "replicated":
        return tensor
    if item.cut == "columns":
        return tensor.chunk(workers, dim=1)[worker]
    if item.cut == "vocab":
        rows = -(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // workers
        return tensor[rows * worker : rows * (worker + 1)]
    pieces = min(workers, shape.groups) if item.cut == "qkv" and part > 0 else workers
    return tensor.chunk(pieces)[worker * pieces // workers]


def first_difference(expected: Sequence[Digests], found: Sequence[Mapping[str, str]]) -> str | None:
    """The first tensor, in the order of the push, that a worker holds otherwise; None where all agree.

    Example: "model.layers.3.self_attn.k_proj.weight of worker 1"
    """
    names = list(expected[0]) + sorted({name for worker in found for name in worker} - expected[0].keys())
    for name in names:
        for rank, (sent, held) in enumerate(zip(expected, found, strict=True)):
            if sent.get(name) != held.get(name):
                return f"{name} of worker {rank}" if len(expected) > 1 else name
    return None
