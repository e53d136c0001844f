"""Weights from a Hugging Face directory into a policy, and from a policy into a new one.

    load_hf_weights(policy, path)
    export_hf(policy, source_dir=path, target_dir=run_dir / "hf")

A round trip gives back the source's tensors bit for bit, with their names, shapes and dtypes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from oblr_megatron.checkpoint.hf_dir import INDEX, SINGLE
from oblr_megatron.checkpoint.hf_write import MAX_SHARD_BYTES, copy_description, whole_directory, write_weights
from oblr_megatron.checkpoint.safetensors_io import DTYPES
from oblr_megatron.errors import UserError
from oblr_megatron.model.qwen3 import Policy
from oblr_megatron.weights.export import MegatronWeights, TensorMeta
from oblr_megatron.weights.names import HF_EMBEDDING, HF_OUTPUT, ModelShape, Sliceable, entry, split, table


class HFTensors:
    """The tensors of a directory's safetensors files, read only where they are sliced."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._open = {
            file: stack.enter_context(safe_open(path / file, framework="pt", device="cpu"))
            for file in _weight_files(path)
        }
        self._files = {name: file for file, tensors in self._open.items() for name in tensors.keys()}  # noqa: SIM118

    @property
    def names(self) -> list[str]:
        """Every tensor there is."""
        return list(self._files)

    def __getitem__(self, name: str) -> Sliceable:
        return self._open[self._files[name]].get_slice(name)

    def dtype(self, name: str) -> torch.dtype:
        """From the file's header."""
        return DTYPES[self._open[self._files[name]].get_slice(name).get_dtype()]


@contextmanager
def open_hf_tensors(path: Path) -> Iterator[HFTensors]:
    """Open a directory's weights, one file or several with an index."""
    with ExitStack() as stack:
        yield HFTensors(path, stack)


def load_hf_weights(policy: Policy, path: Path) -> None:
    """Fill this rank's parameters; each rank reads the slices it holds and nothing else.

    Make the optimizer afterwards: it copies bf16 weights into its fp32 masters.

    Raises:
        UserError: a tensor is missing or unknown, or its shape is not what config.json says.
    """
    shape = ModelShape.of(policy.hf_config)
    parallel = policy.parallel
    with open_hf_tensors(path) as tensors, torch.no_grad():
        _check_names(tensors, shape, path)
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
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a directory that transformers and vLLM load; collective, every rank takes part and rank 0 writes.

    The directory appears whole or not at all: it is written under another name and renamed at the end.

    Args:
        policy: the weights, as they are now.
        source_dir: the directory the policy was loaded from: its config, tokenizer and dtypes are kept.
        target_dir: must not exist.
        dtype: of all tensors; by default each keeps the dtype it has in the source.
        max_shard_bytes: larger models are written as several files with an index.

    Raises:
        UserError: target_dir exists.
    """
    _agree_on_absent(target_dir)
    weights = MegatronWeights(policy)
    if policy.parallel.rank == 0:
        metadata = weights.metadata()
        plan = _plan(metadata, source_dir, dtype)
        stream = iter(weights) if len(plan) == len(metadata) else _with_output(weights)
        with whole_directory(target_dir) as partial:
            copy_description(source_dir, partial, dtype)
            write_weights(stream, plan, partial, max_shard_bytes)
    else:
        for _ in weights:
            pass
    dist.barrier()


def _weight_files(path: Path) -> list[str]:
    if (path / INDEX).is_file():
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    return [SINGLE]


def _check_names(tensors: HFTensors, shape: ModelShape, path: Path) -> None:
    expected = {name: size for item in table(shape) for name, size in zip(item.hf, item.shapes, strict=True)}
    allowed = {HF_OUTPUT} if shape.tied else set()  # some tied checkpoints store the output layer all the same
    stored = set(tensors.names)
    problems = {
        "missing": [name for name in expected if name not in stored],
        "unknown": [name for name in tensors.names if name not in expected and name not in allowed],
        "of another shape than config.json says": [
            name
            for name, size in expected.items()
            if name in stored and tuple(tensors[name].get_shape()) != size  # type: ignore[attr-defined]
        ],
    }
    for what, names in problems.items():
        if names:
            raise UserError(
                f"tensor {names[0]!r} is {what}" + (f", and {len(names) - 1} more" if len(names) > 1 else ""),
                where=str(path),
                fix="give a complete Qwen3 checkpoint whose config.json belongs to it",
            )


def _agree_on_absent(target_dir: Path) -> None:
    """Rank 0 looks, and all ranks raise or none does."""
    exists = [target_dir.exists()]
    dist.broadcast_object_list(exists, src=0)
    if exists[0]:
        raise UserError("the export's target exists", where=str(target_dir), fix="name a new directory, or remove it")


def _plan(metadata: Sequence[TensorMeta], source_dir: Path, dtype: torch.dtype | None) -> list[TensorMeta]:
    """What is written, in order: the stream's tensors in the source's dtypes, and a tied output layer it stores."""
    with open_hf_tensors(source_dir) as source:
        plan = [TensorMeta(name, dtype or source.dtype(name), shape) for name, _, shape in metadata]
        if HF_OUTPUT in source.names and HF_OUTPUT not in {meta.name for meta in metadata}:
            plan.append(TensorMeta(HF_OUTPUT, dtype or source.dtype(HF_OUTPUT), plan[0].shape))
    return plan


def _with_output(stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The stream of a tied model with the output layer at its end: the embedding once more."""
    embedding: Tensor | None = None
    for name, tensor in stream:
        if name == HF_EMBEDDING:
            embedding = tensor
        yield name, tensor
    assert embedding is not None
    yield HF_OUTPUT, embedding
