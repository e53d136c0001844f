"""Partial directories: what a save or an export writes, or what a killed process left of it. Imports no torch.

.step_00000020.node7-3f1c2a9b-4242-0.partial      next to the target

The name has the target's name, the writer's host, a digest of its boot and container, its process id and a number.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from oblr_megatron.runtime.processes import here_in_short

FOREIGN_PARTIAL_S = 3600.0  # a partial directory of elsewhere is kept this long after its last change
BLOCK = 512  # unit of st_blocks, see stat(2)

_PARTIAL = re.compile(r"\..+\.(?P<place>[^/]+)-(?P<pid>\d+)-\d+\.partial")


def partial_names(target: Path) -> Iterator[Path]:
    """Names for partial directories of this process next to `target`."""
    owner = f"{_place()}-{os.getpid()}"
    return (target.with_name(f".{target.name}.{owner}-{number}.partial") for number in itertools.count())


def sweep(directory: Path) -> None:
    """Remove partial directories that interrupted writers left; this process must not be writing.

    Partials that another process may still be writing are kept: in this container while a process with that id lives,
    of another container or host until FOREIGN_PARTIAL_S after the last change.
    """
    for partial, place, pid in _partials(directory):
        if not _is_alive(partial, place, pid):
            shutil.rmtree(partial, ignore_errors=True)  # the next sweep retries


def remove_all(directory: Path) -> None:
    """Remove every partial directory; for the one process that may write here."""
    for partial, _, _ in _partials(directory):
        shutil.rmtree(partial, ignore_errors=True)


def disk_bytes(directory: Path) -> int:
    """Space that `remove_all` would free; 0 if the directory does not exist."""
    total = 0
    for partial, _, _ in _partials(directory):
        for folder, _, names in os.walk(partial):
            for name in names:
                with suppress(FileNotFoundError):  # its owner moved it meanwhile
                    total += Path(folder, name).lstat().st_blocks * BLOCK
    return total


def _partials(directory: Path) -> Iterator[tuple[Path, str, int]]:
    """Each partial directory with the place and the process id in its name."""
    for partial in directory.glob(".*.partial"):
        named = _PARTIAL.fullmatch(partial.name)
        if named is not None and partial.is_dir():
            yield partial, named["place"], int(named["pid"])


def _place() -> str:
    """Where a process id of this process has a meaning: hosts, and containers of one host, have different ones."""
    return f"{socket.gethostname()}-{here_in_short()}"


def _is_alive(partial: Path, place: str, pid: int) -> bool:
    if place == _place():
        return pid != os.getpid() and Path(f"/proc/{pid}").exists()
    try:
        changes = [path.lstat().st_mtime for path in (partial, *partial.rglob("*"))]
    except OSError:  # its owner moved a file meanwhile
        return True
    return time.time() - max(changes) < FOREIGN_PARTIAL_S
