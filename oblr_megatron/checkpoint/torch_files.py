"""File writer for torch.distributed.checkpoint: synced, without torch's checksums, with the cause of write errors.

with plain_files():
    dcp.save(state, storage_writer=TensorFiles(directory), planner=planner, process_group=group)
save_common(common, directory)
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.serialization import get_crc32_options, set_crc32_options

BACKEND, VERSION = "torch_dist", 1  # megatron-core's name for the format
COMMON, DESCRIPTION = "common.pt", "metadata.json"


class TensorFiles(dcp.FileSystemWriter):
    """Writes one file per rank, from tensors that are on the CPU or come there when they are read."""

    def __init__(self, directory: Path) -> None:
        # 0: torch copies nothing ahead. Otherwise it uses the thread's current CUDA stream, also for tensors on the
        # CPU: a new thread's is the training stream of GPU 0.
        super().__init__(directory, sync_files=True, per_thread_copy_ahead=0)
        self.fs = _Files()


@contextmanager
def plain_files() -> Iterator[None]:
    """Turn off torch's checksums per tensor, because the manifest has one per file."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def save_common(common: dict[str, Any], directory: Path) -> None:
    """Write the non-tensor state and megatron-core's format description; `store.commit` syncs both files.

    The files are those of megatron-core 0.16, and every later version to 0.19 reads them. Its own writers differ: 0.17
    moved the first one, 0.19 deprecates it, and 0.19 leaves the common backend out of the description.

    Raises:
        OSError: writing failed.
    """
    description = {
        "sharded_backend": BACKEND,
        "sharded_backend_version": VERSION,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    try:
        torch.save(common, directory / COMMON)
        (directory / DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")
    except RuntimeError as error:  # torch's type for a failed write
        raise OSError(str(error)) from error


class _File(io.FileIO):
    """A file that keeps the cause of a failed write; torch would only report an unexpected position."""

    failure: OSError | None = None

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.failure = error
            raise


class _Files(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        file = _File(path, mode)
        try:
            with io.BufferedWriter(file) as stream:
                yield stream
        except RuntimeError as error:
            if file.failure is not None:
                raise OSError(file.failure.errno, file.failure.strerror, str(path)) from error
            raise
