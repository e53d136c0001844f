"""Reads and writes safetensors files one tensor at a time.

The safetensors library maps files into memory, so tensors that were read stay resident while the file is open, and it
needs all tensors of a file at once to write it. To hold only one layer, this module uses plain reads, and writes the
header first and then each tensor at its offset.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oblr_megatron.checkpoint.hf_dir import HFDir
from oblr_megatron.checkpoint.safetensors_header import LENGTH_BYTES, read_header
from oblr_megatron.errors import RunError
from oblr_megatron.weights.export import TensorMeta

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8  # bytes; the first tensor begins at a multiple of it


class TensorReader:
    """The tensors of a directory's weight files, each read when requested.

    Raises:
        UserError: a file is cut off, or is not a safetensors file.
        RunError: a file cannot be read any more.
    """

    def __init__(self, directory: HFDir, stack: ExitStack) -> None:
        self._places: dict[str, tuple[BufferedReader, int]] = {}
        self.metas: dict[str, TensorMeta] = {}
        for name in directory.weight_files:
            file = directory.path / name
            start, entries = read_header(file)
            stream = stack.enter_context(file.open("rb"))
            for tensor, entry in entries.items():
                self._places[tensor] = stream, start + entry["data_offsets"][0]
                self.metas[tensor] = TensorMeta(tensor, DTYPES[entry["dtype"]], tuple(entry["shape"]))

    def __getitem__(self, name: str) -> Tensor:
        stream, offset = self._places[name]
        _, dtype, shape = self.metas[name]
        tensor = torch.empty(shape, dtype=dtype)
        try:
            stream.seek(offset)
            count = stream.readinto(_bytes_of(tensor))
        except OSError as error:  # an error of a disk or a network; it names no file
            raise RunError(f"cannot read {stream.name}: {error.strerror or error}") from error
        assert count == tensor.nbytes, f"{name}: {count} bytes read of {tensor.nbytes}"
        return tensor


@contextmanager
def open_tensors(directory: HFDir) -> Iterator[TensorReader]:
    """A reader for a directory that passed `check_hf_dir`; its files are open inside the block."""
    with ExitStack() as stack:
        yield TensorReader(directory, stack)


def write_file(path: Path, metas: Sequence[TensorMeta], stream: Iterator[tuple[str, Tensor]]) -> int:
    """Write and sync one file; return the bytes of its tensors.

    `metas` are its tensors, in the order of the stream of (name, tensor) pairs. Tensors are cast to their dtype there.
    """
    header, offsets, total = _layout(metas)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        for meta in metas:
            name, tensor = next(stream)
            assert (name, tuple(tensor.shape)) == (meta.name, meta.shape), f"the stream yields {name}, not {meta.name}"
            file.seek(LENGTH_BYTES + len(header) + offsets[name])
            file.write(_bytes_of(tensor.detach().to(device="cpu", dtype=meta.dtype).contiguous()))
        file.flush()
        os.fsync(file.fileno())
    return total


def _layout(metas: Sequence[TensorMeta]) -> tuple[bytes, dict[str, int], int]:
    """(header, offset of each tensor after the header, total bytes).

    Wider dtypes come first, so that every tensor is aligned to its element size.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for meta in sorted(metas, key=lambda meta: -meta.dtype.itemsize):
        offsets[meta.name], end = end, end + num_bytes(meta)
        place = [offsets[meta.name], end]
        entries[meta.name] = {"dtype": NAMES[meta.dtype], "shape": list(meta.shape), "data_offsets": place}
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % ALIGNMENT), offsets, end


def num_bytes(meta: TensorMeta) -> int:
    """Size of a tensor in bytes."""
    return prod(meta.shape) * meta.dtype.itemsize


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)
