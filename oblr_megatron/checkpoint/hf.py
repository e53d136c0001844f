"""Loads a Hugging Face directory into a policy, and exports a policy to a new directory.

    load_hf_weights(policy, path)
    export_hf(policy, check_hf_dir(path), target_dir=run_dir / "hf")

A round trip reproduces the source's tensors bit for bit, with names, shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from oblr_megatron.checkpoint.hf_dir import BUFFERS, SINGLE, HFDir, check_tensors, listed_tensors
from oblr_megatron.checkpoint.hf_write import MAX_SHARD_BYTES, whole_directory, write_description, write_weights
from oblr_megatron.checkpoint.peft_dir import write_adapter
from oblr_megatron.checkpoint.safetensors_io import DTYPES
from oblr_megatron.checkpoint.store import check_absent, check_replaceable
from oblr_megatron.model.policy import Policy
from oblr_megatron.runtime.collectives import Outcome, attempt, raise_first
from oblr_megatron.weights.adapter import AdapterShape
from oblr_megatron.weights.export import MegatronWeights, TensorMeta
from oblr_megatron.weights.export_adapter import MegatronAdapter
from oblr_megatron.weights.names import HF_EMBEDDING, HF_OUTPUT, ModelShape, entry, split


@contextmanager
def open_hf_tensors(path: Path) -> Iterator[dict[str, Any]]:
    """Lazy slices of a directory's tensors, in one file or several with an index, without `BUFFERS`.

    Only indexed elements are read.
    """
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path / file, framework="pt", device="cpu"))
            for file in sorted(listed_tensors(path)) or [SINGLE]
        ]
        named = ((name, tensors) for tensors in files for name in tensors.keys())  # noqa: SIM118
        yield {name: tensors.get_slice(name) for name, tensors in named if not name.endswith(BUFFERS)}


def load_hf_weights(policy: Policy, path: Path) -> None:
    """Fill this rank's parameters; each rank reads only its own slices.

    Create the optimizer afterwards, because it copies bf16 weights into its fp32 masters.

    Raises:
        UserError: a tensor is missing or unknown, or its shape contradicts config.json.
    """
    shape = ModelShape.of(policy.hf_config)
    parallel = policy.parallel
    with open_hf_tensors(path) as tensors, torch.no_grad():
        shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
        check_tensors(policy.hf_config.to_dict(), shapes, path)
        dense, expert = (parallel.tp_rank, parallel.tp_size), (parallel.etp_rank, parallel.etp_size)
        for name, parameter in policy.base_parameters():
            item = entry(name, shape)
            sources = [tensors[hf_name] for hf_name in item.hf]
            rank, ranks = dense if item.expert is None else expert
            padded = policy.padded_vocab_size
            parameter.copy_(split(item, sources, shape, tp_rank=rank, tp_size=ranks, padded_vocab=padded))


def export_hf(
    policy: Policy,
    source: HFDir,
    target_dir: Path,
    *,
    replaces: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a directory that transformers and vLLM load; collective, rank 0 writes.

    The directory is written under a temporary name and renamed at the end, so that it may be the source. If target_dir
    is a link, what it names is written.

    Args:
        policy: its current weights are written.
        source: what the policy was loaded from, for config, tokenizer and dtypes; it may be gone from the disk.
        target_dir: must not exist or must be empty, unless `replaces`.
        replaces: whether an older target_dir is replaced; it stays until the new one is complete.
        max_shard_bytes: larger models are written as several files with an index.

    Raises:
        UserError: see `check_absent` and `check_replaceable`.
        RunError: rank 0 cannot write. Every rank raises either error.
    """
    rank, target = policy.parallel.rank, target_dir.resolve()
    check = check_replaceable if replaces else check_absent
    _agree(attempt(lambda: check(target) if rank == 0 else None))
    weights = MegatronWeights(policy)
    metadata = weights.metadata()
    plan = _plan(metadata, source)
    stream = iter(weights) if len(plan) == len(metadata) else _with_output(weights)

    def write() -> None:
        with whole_directory(target, replaces=replaces) as partial:
            write_description(source.config, source.copied, partial)
            write_weights(stream, plan, partial, max_shard_bytes)

    own = attempt(write if rank == 0 else lambda: None)
    _take_part(stream)
    _agree(own)


def export_adapter(
    policy: Policy, adapter: AdapterShape, alpha: float, base: Path, target_dir: Path, *, replaces: bool = False
) -> None:
    """Write the policy's adapter in PEFT's format; collective, rank 0 writes. Arguments and errors as of `export_hf`.

    `base` is the directory of the model that it adapts.
    """
    rank, target = policy.parallel.rank, target_dir.resolve()
    check = check_replaceable if replaces else check_absent
    _agree(attempt(lambda: check(target) if rank == 0 else None))
    tensors = MegatronAdapter(policy, adapter)
    stream, metas = iter(tensors), tensors.metadata()

    def write() -> None:
        write_adapter(stream, metas, target, adapter, alpha=alpha, base=str(base), replaces=replaces)

    own = attempt(write if rank == 0 else lambda: None)
    _take_part(stream)
    _agree(own)


def _take_part(stream: Iterator[Any]) -> None:
    """The rest of the stream: every rank takes part in every tensor, also after a failure.

    One tensor at a time on GPUs. A collective's deadline begins when it is enqueued, and rank 0 writes for long.
    """
    for _ in stream:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def _agree(own: Outcome[None]) -> None:
    """All ranks raise the failure of the first rank."""
    shared = [replace(own, exception=None)]
    dist.broadcast_object_list(shared, src=0)
    raise_first(shared, own)


def _plan(metadata: Sequence[TensorMeta], source: HFDir) -> list[TensorMeta]:
    """Tensors to write, in order, in the source's dtypes; includes a tied output layer if the source stores it."""
    shapes = {name: shape for name, _, shape in metadata}
    if HF_OUTPUT in source.dtypes and HF_OUTPUT not in shapes:
        shapes[HF_OUTPUT] = shapes[HF_EMBEDDING]
    return [TensorMeta(name, DTYPES[source.dtypes[name]], shape) for name, shape in shapes.items()]


def _with_output(stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A tied model's stream, followed by the embedding again as output layer."""
    for name, tensor in stream:
        if name == HF_EMBEDDING:
            embedding = tensor
        yield name, tensor
    yield HF_OUTPUT, embedding
