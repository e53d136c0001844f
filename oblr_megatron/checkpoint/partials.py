"""Partial directories: what a save or an export writes, or what a killed process left of it. Imports no torch.

.step_00000020.node7-3f1c2a9b-4242-0.partial      next to the target
.step_00000020.node7-3f1c2a9b-4242-0.replaced     an older target, while a new directory takes its name

The name has the target's name, the writer's host, a digest of its boot and container, its process id and a number.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from oblr_megatron.runtime.processes import short_pid_scope

FOREIGN_PARTIAL_S = 3600.0  # a partial directory of elsewhere is kept this long after its last change
BLOCK = 512  # unit of st_blocks, see stat(2)

PARTIAL, REPLACED = "partial", "replaced"

logger = logging.getLogger(__name__)

_PARTIAL = re.compile(rf"\.(?P<target>.+)\.(?P<place>[^/.]+)-(?P<pid>\d+)-\d+\.({PARTIAL}|{REPLACED})")


def partial_names(target: Path, kind: str = PARTIAL) -> Iterator[Path]:
    """Names for directories of this process next to `target`: partial ones, or `REPLACED` ones."""
    owner = f"{_place()}-{os.getpid()}"
    return (target.with_name(f".{target.name}.{owner}-{number}.{kind}") for number in itertools.count())


def sweep(directory: Path) -> None:
    """Remove partial directories that interrupted writers left; this process must not be writing.

    Partials that another process may still be writing are kept: in this container while a process with that id lives,
    of another container or host until FOREIGN_PARTIAL_S after the last change. A replaced directory gets its name back
    if its writer was killed before the new one had it.
    """
    for partial, target, place, pid in _partials(directory):
        if not _is_alive(partial, place, pid):
            _clear(partial, target)


def remove_all(directory: Path, only: str | None = None) -> None:
    """Remove every partial directory, or give it its name back, as `sweep`; for the one process that may write here.

    `only` names one target, where others may write to other targets of the directory.
    """
    for partial, target, _, _ in _partials(directory):
        if only in (None, target.name):
            _clear(partial, target)


def remove(directory: Path) -> None:
    """Remove a directory as far as possible; the next sweep retries. Of a link to one only the link is removed.

    Raises:
        OSError: the link cannot be removed.
    """
    if directory.is_symlink():
        named = directory.readlink()
        directory.unlink()
        logger.warning("removed the link %s; the directory that it names stays: %s", directory, named)
    else:
        shutil.rmtree(directory, ignore_errors=True)


def disk_bytes(directory: Path, only: str | None = None) -> int:
    """Space that `remove_all` would free; 0 if the directory does not exist."""
    total = 0
    for partial, target, _, _ in _partials(directory):
        if only not in (None, target.name) or partial.is_symlink() or _is_last(partial, target):
            continue
        for folder, _, names in os.walk(partial):
            for name in names:
                with suppress(FileNotFoundError):  # its owner moved it meanwhile
                    total += Path(folder, name).lstat().st_blocks * BLOCK
    return total


def _partials(directory: Path) -> Iterator[tuple[Path, Path, str, int]]:
    """Each partial directory, or link to one, with its target, and the place and the process id in its name."""
    for partial in [*directory.glob(f".*.{PARTIAL}"), *directory.glob(f".*.{REPLACED}")]:
        named = _PARTIAL.fullmatch(partial.name)
        if named is not None and (partial.is_dir() or partial.is_symlink()):
            yield partial, directory / named["target"], named["place"], int(named["pid"])


def _clear(partial: Path, target: Path) -> None:
    with suppress(OSError):  # another process was faster, or the next sweep retries
        if _is_last(partial, target):
            partial.rename(target)
        else:
            remove(partial)


def _is_last(partial: Path, target: Path) -> bool:
    """Whether this is a replaced directory of which no new one has the name."""
    return partial.suffix == f".{REPLACED}" and not os.path.lexists(target)


def _place() -> str:
    """Where a process id of this process has a meaning: hosts, and containers of one host, have different ones.

    It has no dot, so that the target's name can be told from it.
    """
    return f"{socket.gethostname()}-{short_pid_scope()}".replace(".", "_")


def _is_alive(partial: Path, place: str, pid: int) -> bool:
    if place == _place():
        return pid != os.getpid() and Path(f"/proc/{pid}").exists()
    try:
        changes = [path.lstat().st_mtime for path in (partial, *partial.rglob("*"))]
    except OSError:  # its owner moved a file meanwhile
        return True
    return time.time() - max(changes) < FOREIGN_PARTIAL_S
