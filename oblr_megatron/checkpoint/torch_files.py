"""How torch.distributed.checkpoint writes files here: synced, without checksums of its own, and telling why it cannot.

writer = file_writer(directory)
with plain_files():
    dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
save_common(common, directory)
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.serialization import get_default_save_common_strategy
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.serialization import get_crc32_options, set_crc32_options

BACKEND, VERSION = "torch_dist", 1  # megatron-core's name for the format


class TensorFiles(dcp.FileSystemWriter):
    """A file for each rank."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, sync_files=True, **options)
        self.fs = _Files()


@contextmanager
def plain_files() -> Iterator[None]:
    """Tensors are written without checksums of their own: the manifest has one of every file."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def save_common(common: dict[str, Any], directory: Path) -> None:
    """What is not tensors, and megatron-core's mark of its format; `store.commit` syncs both files.

    Raises:
        OSError: the file system refuses.
    """
    try:
        get_default_save_common_strategy().save_common(common, str(directory))
        save_config(CheckpointingConfig(BACKEND, VERSION), str(directory))
    except RuntimeError as error:  # torch's for a file that takes nothing
        raise OSError(str(error)) from error


class _File(io.FileIO):
    """A file that remembers why it could not be written: torch only tells of a position that it did not expect."""

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
