"""Loads a Hugging Face directory into a policy, and exports a policy to a new directory.

    load_hf_weights(policy, path)
    export_hf(policy, source_dir=path, target_dir=run_dir / "hf")

A round trip reproduces the source's tensors bit for bit, with names, shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from oblr_megatron.checkpoint.hf_dir import SINGLE, check_tensors, listed_tensors
from oblr_megatron.checkpoint.hf_write import MAX_SHARD_BYTES, copy_description, whole_directory, write_weights
from oblr_megatron.checkpoint.safetensors_io import DTYPES
from oblr_megatron.checkpoint.store import check_absent
from oblr_megatron.model.policy import Policy
from oblr_megatron.runtime.collectives import attempt, raise_first
from oblr_megatron.weights.export import MegatronWeights, TensorMeta
from oblr_megatron.weights.names import HF_EMBEDDING, HF_OUTPUT, ModelShape, Sliceable, entry, split


class HFTensors:
    """The tensors of a directory's safetensors files; only requested slices are read."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._open = {
            file: stack.enter_context(safe_open(path / file, framework="pt", device="cpu"))
            for file in sorted(listed_tensors(path)) or [SINGLE]
        }
        self._files = {name: file for file, tensors in self._open.items() for name in tensors.keys()}  # noqa: SIM118

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._files)

    def __getitem__(self, name: str) -> Sliceable:
        return self._open[self._files[name]].get_slice(name)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from the file's header."""
        return DTYPES[self._open[self._files[name]].get_slice(name).get_dtype()]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, from the headers."""
        return {name: tuple(self._open[file].get_slice(name).get_shape()) for name, file in self._files.items()}


@contextmanager
def open_hf_tensors(path: Path) -> Iterator[HFTensors]:
    """Open a directory's weight files, one file or several with an index."""
    with ExitStack() as stack:
        yield HFTensors(path, stack)


def load_hf_weights(policy: Policy, path: Path) -> None:
    """Fill this rank's parameters; each rank reads only its own slices.

    Create the optimizer afterwards, because it copies bf16 weights into its fp32 masters.

    Raises:
        UserError: a tensor is missing or unknown, or its shape contradicts config.json.
    """
    shape = ModelShape.of(policy.hf_config)
    parallel = policy.parallel
    with open_hf_tensors(path) as tensors, torch.no_grad():
        check_tensors(policy.hf_config.to_dict(), tensors.shapes(), path)
        for name, parameter in policy.named_parameters():
            item = entry(name, shape)
            sources = [tensors[hf_name] for hf_name in item.hf]
            dense = item.expert is None
            shard = split(
                item,
                sources,
                shape,
                tp_rank=parallel.tp_rank if dense else parallel.etp_rank,
                tp_size=parallel.tp_size if dense else parallel.etp_size,
                padded_vocab=policy.padded_vocab_size,
            )
            parameter.copy_(shard)


def export_hf(
    policy: Policy,
    source_dir: Path,
    target_dir: Path,
    dtype: torch.dtype | None = None,
    *,
    replaces: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a directory that transformers and vLLM load; collective, rank 0 writes.

    The directory is written under a temporary name and renamed at the end, so that source_dir may be target_dir.

    Args:
        policy: its current weights are written.
        source_dir: directory the policy was loaded from, for config, tokenizer and dtypes.
        target_dir: must not exist, unless `replaces`.
        dtype: of all tensors; by default each keeps its dtype in the source.
        replaces: whether an older target_dir is replaced; it stays until the new one is complete.
        max_shard_bytes: larger models are written as several files with an index.

    Raises:
        UserError: target_dir exists.
    """
    _agree_on_target(target_dir, replaces=replaces)
    weights = MegatronWeights(policy)
    if policy.parallel.rank == 0:
        metadata = weights.metadata()
        plan = _plan(metadata, source_dir, dtype)
        stream = iter(weights) if len(plan) == len(metadata) else _with_output(weights)
        with whole_directory(target_dir, replaces=replaces) as partial:
            copy_description(source_dir, partial, dtype)
            write_weights(stream, plan, partial, max_shard_bytes)
    else:
        for _ in weights:
            pass
    dist.barrier()


def _agree_on_target(target_dir: Path, *, replaces: bool) -> None:
    """Rank 0 checks; all ranks raise if the target exists, or is none that can be replaced."""
    directory = target_dir.is_dir() and not target_dir.is_symlink()
    own = attempt(lambda: None if replaces and directory else check_absent(target_dir))
    shared = [replace(own, exception=None)]
    dist.broadcast_object_list(shared, src=0)
    raise_first(shared, own)


def _plan(metadata: Sequence[TensorMeta], source_dir: Path, dtype: torch.dtype | None) -> list[TensorMeta]:
    """Tensors to write, in order, in the source's dtypes; includes a tied output layer if the source stores it."""
    with open_hf_tensors(source_dir) as source:
        plan = [TensorMeta(name, dtype or source.dtype(name), shape) for name, _, shape in metadata]
        if HF_OUTPUT in source.names and HF_OUTPUT not in {meta.name for meta in metadata}:
            plan.append(TensorMeta(HF_OUTPUT, dtype or source.dtype(HF_OUTPUT), plan[0].shape))
    return plan


def _with_output(stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A tied model's stream, followed by the embedding again as output layer."""
    embedding: Tensor | None = None
    for name, tensor in stream:
        if name == HF_EMBEDDING:
            embedding = tensor
        yield name, tensor
    assert embedding is not None
    yield HF_OUTPUT, embedding
