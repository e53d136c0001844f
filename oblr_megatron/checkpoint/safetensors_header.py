"""Reads and checks the header of a safetensors file. Imports no torch."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from oblr_megatron.checks.git_lfs import refuse_pointer
from oblr_megatron.errors import UserError

LENGTH_BYTES = 8  # at the start of the file: size of the JSON header, little endian
MAX_HEADER_BYTES = 100_000_000
AGAIN = "download or export the file again"
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of a plain model's tensors, by their names in safetensors


def read_header(file: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """The offset of the first tensor in a safetensors file, and dtype, shape and relative data_offsets of each.

    Raises:
        UserError: the file is cut off, or is not a safetensors file.
    """
    try:
        size, stream = file.stat().st_size, file.open("rb")
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror}", where=str(file), fix="make it readable") from error
    with stream:
        refuse_pointer(file)
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES + length and length <= MAX_HEADER_BYTES:
            raise UserError(f"the file is cut off inside its header ({size} bytes)", where=str(file), fix=AGAIN)
        try:
            if length > MAX_HEADER_BYTES:
                raise ValueError("header length")
            header = json.loads(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = _end_of(entries)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise UserError("not a safetensors file", where=str(file), fix=AGAIN) from error
    expected = LENGTH_BYTES + length + end
    if size != expected:
        state = "cut off" if size < expected else "too long"
        raise UserError(
            f"the file is {state}: {size} bytes, its header describes {expected}", where=str(file), fix=AGAIN
        )
    return LENGTH_BYTES + length, entries


def _end_of(entries: dict[str, dict[str, Any]]) -> int:
    """End offset of the last tensor.

    Raises:
        ValueError, KeyError or TypeError: an entry is malformed, or the tensors overlap or leave gaps.
    """
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: entry["data_offsets"]):
        begin, after = entry["data_offsets"]
        if not all(type(size) is int and size >= 0 for size in (begin, after, *entry["shape"])) or begin != end:
            raise ValueError("offsets or shape")
        end = after
        size = DTYPE_BYTES.get(entry["dtype"])
        if end - begin != (end - begin if size is None else prod(entry["shape"]) * size):
            raise ValueError("the offsets contradict shape and dtype")
    return end
