"""Converts a Hugging Face directory to a torch_dist checkpoint of megatron-core, and back.

    to_megatron(Path("Qwen3-8B"), Path("qwen3_8b"))           # loads under any TP, PP, EP and VPP
    to_hf(Path("run/checkpoints/step_00000100"), Path("hf"))  # from a checkpoint saved under any layout

One process converts tensor by tensor without a GPU; memory holds at most one layer. The target is created atomically.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from oblr_megatron.checkpoint import store
from oblr_megatron.checkpoint.hf_description import hf_config_in
from oblr_megatron.checkpoint.hf_dir import QUANTIZATION, UNQUANTIZED, HFDir, check_hf_dir, check_hf_files
from oblr_megatron.checkpoint.hf_write import MAX_SHARD_BYTES, copy_description, whole_directory, write_weights
from oblr_megatron.checkpoint.peft_dir import check_adapter_dir, merge_adapter, open_merged
from oblr_megatron.checkpoint.piece_reader import PieceReader
from oblr_megatron.checkpoint.pieces import (
    NAMINGS,
    Piece,
    meta_model,
    pieces_of,
    sharded_state,
    single_process,
)
from oblr_megatron.checkpoint.safetensors_io import DTYPES as DTYPES_OF
from oblr_megatron.checkpoint.safetensors_io import TensorReader, num_bytes, open_tensors
from oblr_megatron.checkpoint.saver import HF
from oblr_megatron.checkpoint.store import CheckpointError
from oblr_megatron.checkpoint.torch_dist import METADATA, write_pieces
from oblr_megatron.checks.layout import check_model
from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.errors import UserError
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.precision import DTYPES
from oblr_megatron.weights.export import TensorMeta
from oblr_megatron.weights.names import ModelShape, split, table, views

Advance = Callable[[int, int], None]
"""Called after each tensor with (bytes done, total bytes)."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished conversion. Example: Conversion(Path("qwen3_0.6b"), 1192099840, 2.1, 1510000000, torch.bfloat16)"""

    target: Path
    num_bytes: int  # of the tensors
    seconds: float
    peak_bytes: int  # largest resident memory of the process so far
    dtype: torch.dtype  # widest dtype of the tensors

    def __str__(self) -> str:
        return (
            f"wrote {self.target}: {self.num_bytes / 1e9:.3f} GB in {self.seconds:.1f} s, "
            f"{self.num_bytes / self.seconds / 1e9:.2f} GB/s, peak memory {self.peak_bytes / 1e9:.2f} GB"
        )


def to_megatron(
    source: Path,
    target: Path,
    dtype: torch.dtype | None = None,
    advance: Advance = lambda done, total: None,
    *,
    base: Path | None = None,
) -> Conversion:
    """Write a checkpoint that holds only weights.

    Args:
        source: Hugging Face directory of a model.
        target: must not exist, or be empty.
        dtype: of the checkpoint; by default the widest dtype of the source's tensors.
        advance: see `Advance`.
        base: directory of a model; the source is then an adapter of it, which is merged.

    Raises:
        UserError: the source is incomplete, or the target exists.
        RunError: writing failed; NoSpaceError if there is no room.
    """
    start = time.monotonic()
    hf_dir = check_hf_dir(base or source)
    opened = open_tensors(hf_dir) if base is None else open_merged(check_adapter_dir(source, hf_dir))
    store.check_absent(target)
    hf_config = hf_dir.hf_config()
    check_model(hf_config.to_dict(), ParallelConfig(), where=str(hf_dir.path))
    shape = ModelShape.of(hf_config)
    with opened as tensors, single_process() as parallel:
        kept = dtype or _widest(tensors, shape, hf_dir)
        config = ModelConfig.model_validate({"path": hf_dir.path, "dtype": str(kept).removeprefix("torch.")})
        state = sharded_state(meta_model(hf_config, config, parallel))
        pieces = pieces_of(state, shape)
        total = sum(_size(piece) for piece in pieces)
        store.check_space(target.parent, total)
        done = 0

        def load(piece: Piece) -> Tensor:
            nonlocal done
            sources = [tensors[name] for name in piece.hf]
            whole = sources[0]
            if piece.part is None:
                padded = piece.sharded.local_shape[0]  # used only for tensors with a vocabulary dimension
                whole = split(piece.item, sources, shape, tp_rank=0, tp_size=1, padded_vocab=padded)
            done += _size(piece)
            advance(done, total)
            return whole.to(kept)

        with store.partial_directory(target) as partial:
            write_pieces(state, pieces, load, partial)
            copy_description(hf_dir.path, partial / HF, kept)
            names = [file.relative_to(partial).as_posix() for file in sorted(partial.rglob("*")) if file.is_file()]
            store.commit(partial, target, store.Manifest(0, store.measure(partial, names), {}), replaces=False)
    return Conversion(target, total, time.monotonic() - start, peak_memory(), kept)


def to_hf(
    source: Path,
    target: Path,
    dtype: torch.dtype | None = None,
    *,
    hf_source: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    advance: Advance = lambda done, total: None,
) -> Conversion:
    """Write a Hugging Face directory that transformers and vLLM load.

    Args:
        source: a checkpoint, or a run directory or its checkpoints/, of which the newest checkpoint is taken.
        target: must not exist, or be empty.
        dtype: of all tensors; by default as in the checkpoint.
        hf_source: directory with config.json and tokenizer, for a checkpoint without them.
        max_shard_bytes: larger models are written as several files with an index.
        advance: see `Advance`.

    Raises:
        CheckpointError: the source is not a checkpoint of this model, or is damaged; names the file.
        UserError: the target exists, or config.json is missing or describes no supported model.
        RunError: writing failed; NoSpaceError if there is no room.
    """
    start = time.monotonic()
    source = newest(source)
    store.check_absent(target)
    manifest = _manifest(source, hf_source)
    if manifest is not None:
        _refuse_adapters(manifest, source)
        described = [name for name in manifest.files if name.startswith(f"{HF}/")]
        store.check_contents(source, manifest, [METADATA, *described])  # before it is unpickled
    reader = PieceReader(source)
    files = hf_source or source / HF
    with single_process() as parallel:
        shape, pieces = _find(reader, files, parallel)
        if manifest is not None:
            store.check_contents(source, manifest, reader.files(pieces))
        metas = [
            TensorMeta(name, dtype or piece.sharded.dtype, size)
            for piece in pieces
            for name, size in zip(piece.hf, piece.shapes, strict=True)
        ]
        total = sum(num_bytes(meta) for meta in metas)
        widest = reduce(torch.promote_types, (meta.dtype for meta in metas))
        store.check_space(target.parent, total)
        with whole_directory(target) as partial:
            copy_description(files, partial, widest)
            write_weights(_stream(reader, pieces, shape, advance), metas, partial, max_shard_bytes)
    return Conversion(target, total, time.monotonic() - start, peak_memory(), widest)


def merged_to_hf(
    source: Path, base: Path, target: Path, dtype: torch.dtype | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Conversion:
    """Write an adapter, merged into its base, as a Hugging Face directory; arguments as of `to_hf`.

    Raises:
        UserError: the adapter does not fit the base, or the target exists.
        RunError: writing failed; NoSpaceError if there is no room.
    """
    start = time.monotonic()
    adapter = check_adapter_dir(source, check_hf_dir(base))
    size = merge_adapter(adapter, target, dtype, max_shard_bytes=max_shard_bytes)
    kept = dtype or reduce(torch.promote_types, (DTYPES_OF[name] for name in set(adapter.base.dtypes.values())))
    return Conversion(target, size, time.monotonic() - start, peak_memory(), kept)


def newest(path: Path) -> Path:
    """The path itself if it is a checkpoint, else the newest checkpoint of that run.

    Raises:
        CheckpointError: the run has no checkpoint.
    """
    if (path / store.MANIFEST).exists() or (path / METADATA).exists():
        return path
    run_dir = path.parent if path.name == store.CHECKPOINTS else path
    if not (run_dir / store.CHECKPOINTS).is_dir():
        return path  # reading it will raise the precise error
    checkpoints = store.checkpoints_of(run_dir)
    if not checkpoints:
        raise CheckpointError("the run has no checkpoint", where=str(path), fix="give the directory of a checkpoint")
    return checkpoints[0]


def peak_memory() -> int:
    """Largest resident memory of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _stream(
    reader: PieceReader, pieces: Sequence[Piece], shape: ModelShape, advance: Advance
) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every Hugging Face tensor, in export order."""
    done, total = 0, sum(_size(piece) for piece in pieces)
    for piece in pieces:
        tensor = reader.read(piece)
        named = [(piece.hf[0], tensor)] if piece.part is not None else views(piece.item, tensor[None], shape)
        for (name, view), size in zip(named, piece.shapes, strict=True):
            yield name, view.reshape(size)
        done += _size(piece)
        advance(done, total)


def _find(reader: PieceReader, files: Path, parallel: Parallel) -> tuple[ModelShape, list[Piece]]:
    """The stored model's shape, from its config, and its pieces under any of NAMINGS.

    Raises:
        CheckpointError: the checkpoint does not hold this model.
        UserError: the config is missing, or the model is not supported.
    """
    config = check_hf_files(files)
    check_model(config, ParallelConfig(), where=str(files / "config.json"))
    if config.get(QUANTIZATION) is not None:
        what = "config.json describes quantised weights, but the checkpoint's are not"
        raise UserError(what, where=str(files / "config.json"), fix=UNQUANTIZED)
    hf_config = hf_config_in(files)
    shape = ModelShape.of(hf_config)
    model = meta_model(hf_config, ModelConfig.model_validate({"path": files}), parallel)
    named = [pieces_of(sharded_state(model, naming), shape) for naming in NAMINGS]
    stored = reader.whole.state_dict_metadata
    fitting = [pieces for pieces in named if all(piece.sharded.key in stored for piece in pieces)]
    return shape, reader.find((fitting or named)[0], shape)


def _manifest(source: Path, hf_source: Path | None) -> store.Manifest | None:
    """The checkpoint's manifest; None for a Megatron-LM checkpoint used with `hf_source`."""
    if (source / store.MANIFEST).exists() or not (source / METADATA).exists():
        return store.read_manifest(source)
    if hf_source is None:
        raise CheckpointError(
            f"the checkpoint has neither {store.MANIFEST} nor a config",
            where=str(source),
            fix="give the directory with its config.json and tokenizer as --hf-source",
        )
    return None


def _refuse_adapters(manifest: store.Manifest, source: Path) -> None:
    """Refuse a checkpoint of adapters: the model that they adapt is elsewhere."""
    run = manifest.state.get("config")
    if run and run["model"]["lora"]["rank"]:
        what = f"the checkpoint has the adapters of a run (model.lora), but not their model, {run['model']['path']}"
        fix = "take RUN_DIR/hf, in which the run's end merges both"
        raise CheckpointError(what, where=str(source), fix=fix)


def _widest(tensors: TensorReader, shape: ModelShape, hf_dir: HFDir) -> torch.dtype:
    """The dtype that holds all of the model's tensors."""
    stored = {tensors.metas[name].dtype for item in table(shape) for name in item.hf}
    widest = reduce(torch.promote_types, stored)
    if widest not in DTYPES.values():
        raise UserError(
            f"weights in {str(widest).removeprefix('torch.')} are not supported",
            where=str(hf_dir.path),
            fix="convert them with --dtype float32 or --dtype bfloat16",
        )
    return widest


def _size(piece: Piece) -> int:
    """Bytes of the piece's Hugging Face tensors in the checkpoint's dtype."""
    return sum(prod(size) for size in piece.shapes) * piece.sharded.dtype.itemsize
