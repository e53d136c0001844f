"""Find what a run leaves behind, from outside: processes, shared memory, descriptors, zombies."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ENGINE = "oblr_megatron.engine.worker"
RANK = "soak_rank.py"
SHARED_MEMORY = Path("/dev/shm")
PUSH_BUFFER = "memfd:oblr-weights"
GRACE_S = 15.0  # time for the last processes to end after the run


@dataclass(frozen=True, slots=True)
class Holdings:
    """Resources that the trainer's ranks hold. Example: Holdings(descriptors=81, buffers=2, zombies=0)"""

    descriptors: int
    buffers: int  # descriptors of memory shared with an engine
    zombies: int  # children that have ended but were not reaped


@dataclass
class Family:
    """The processes that a run has started, as seen at each `look`."""

    root: psutil.Process
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def look(self) -> None:
        """Record the current processes."""
        for process in [self.root, *_children(self.root)]:
            self.seen.setdefault(process.pid, process)

    def engines(self) -> list[psutil.Process]:
        """Current engine processes."""
        return [process for process in _children(self.root) if ENGINE in command_of(process)]

    def holdings(self) -> Holdings:
        """Current resources, summed over the trainer's ranks."""
        links = zombies = buffers = 0
        for rank in [self.root, *_children(self.root)]:
            command = command_of(rank)
            if RANK not in command or "torch.distributed.run" in command:
                continue
            targets = _descriptors(rank.pid)
            links += len(targets)
            buffers += sum(PUSH_BUFFER in target for target in targets)
            zombies += sum(_is_zombie(child) for child in _children(rank, recursive=False))
        return Holdings(links, buffers, zombies)

    def left_over(self) -> list[psutil.Process]:
        """Processes that still run GRACE_S after the run."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=GRACE_S)
        return alive


def shared_memory_names() -> set[str]:
    """Names in /dev/shm."""
    return {path.name for path in SHARED_MEMORY.iterdir()}


def leaked(names: Iterable[str]) -> list[str]:
    """The names that remain although no process holds them. Other programs' files are in use or disappear soon."""
    end = time.monotonic() + GRACE_S
    left = sorted(names)
    while left and time.monotonic() < end:
        held = {target for pid in psutil.pids() for target in (*_descriptors(pid), *_mapped(pid))}
        paths = {name: SHARED_MEMORY / name for name in left}
        left = [name for name, path in paths.items() if path.exists() and str(path) not in held]
        time.sleep(1)
    return left


def _children(process: psutil.Process, *, recursive: bool = True) -> list[psutil.Process]:
    try:
        return process.children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def command_of(process: psutil.Process) -> str:
    """The command line of a process; "" if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # the process has ended
        return ""


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _descriptors(pid: int) -> list[str]:
    try:
        links = [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:  # the process has ended or belongs to another user
        return []
    return [target for link in links if (target := _target(link))]


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed since
        return ""


def _mapped(pid: int) -> list[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # the process has ended or belongs to another user
        return []
    return [line.split(maxsplit=5)[-1] for line in lines if str(SHARED_MEMORY) in line]
