"""Writes a Hugging Face directory from a stream of tensors: shards, index, config and tokenizer, atomically.

    with whole_directory(target) as partial:
        copy_description(source, partial, torch.bfloat16)
        write_weights(stream, metas, partial)

Memory holds one tensor at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oblr_megatron.checkpoint.hf_dir import INDEX, SINGLE, copied_files
from oblr_megatron.checkpoint.safetensors_io import num_bytes, write_file
from oblr_megatron.checkpoint.store import partial_directory, put, sync
from oblr_megatron.weights.export import TensorMeta

MAX_SHARD_BYTES = 5_000_000_000


@contextmanager
def whole_directory(target: Path, *, replaces: bool = False) -> Iterator[Path]:
    """An empty directory that is renamed to `target` after the block, or removed if the block raises.

    It replaces an older `target` if `replaces`; otherwise one that has files stays, and this is an error.

    Raises:
        NoSpaceError, RunError: writing failed.
    """
    with partial_directory(target) as partial:
        yield partial
        sync(partial)  # the names of its files
        put(partial, target, replaces=replaces)


def copy_description(source_dir: Path, target_dir: Path, dtype: torch.dtype | None = None) -> None:
    """Copy config, generation config and tokenizer; `dtype` as of `write_description`."""
    config = json.loads((source_dir / "config.json").read_text(encoding="utf-8"))
    write_description(config, copied_files(source_dir), target_dir, dtype)


def write_description(
    config: Mapping[str, Any], files: Mapping[str, bytes], target_dir: Path, dtype: torch.dtype | None = None
) -> None:
    """Write config.json and the files of `copied_files`; `dtype` is that of the new weights, None: the source's."""
    target_dir.mkdir(exist_ok=True)
    for name, content in files.items():
        file = target_dir / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        sync(file)
        sync(file.parent)
    named = str(dtype).removeprefix("torch.")
    if dtype is not None and config.get("dtype", config.get("torch_dtype")) != named:
        # torch_dtype is the key's name before transformers 5
        config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": named}
    (target_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    sync(target_dir / "config.json")


def write_weights(
    stream: Iterator[tuple[str, Tensor]],
    metas: Sequence[TensorMeta],
    target_dir: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> int:
    """Write the tensors as one file, or as several with an index if they exceed `max_shard_bytes`.

    Args:
        stream: the tensors, in the order of `metas`.
        metas: names, shapes and dtypes to write.
        target_dir: exists.
        max_shard_bytes: of a file; a larger tensor gets its own file.

    Returns:
        Bytes of all tensors.
    """
    shards = _shards(metas, max_shard_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        total += write_file(target_dir / file, shard, stream)
        weight_map |= dict.fromkeys((meta.name for meta in shard), file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target_dir / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        sync(target_dir / INDEX)
    return total


def _shards(metas: Sequence[TensorMeta], max_shard_bytes: int) -> list[list[TensorMeta]]:
    """Split the list into files, in order."""
    shards: list[list[TensorMeta]] = [[]]
    size = 0
    for meta in metas:
        if shards[-1] and size + num_bytes(meta) > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(meta)
        size += num_bytes(meta)
    return shards
