"""The lock of a run directory: one run at a time writes into it. Imports no torch.

    with run_lock(config.run_dir):
        ...                                 # another run here is refused, on this machine or on another

RUN_DIR/lock.json names the process and holds its last heartbeat. On one machine the kernel's file lock decides
(flock(2)). It ends with the process. Some file systems do not share it between machines, and some keep it for a machine
that died. Between machines a lock is stale once its heartbeat stops changing. Then another run may take it. If the
first one wakes up again, it finds this and ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from oblr_megatron.checks.run_dir import LOCK_FILE
from oblr_megatron.errors import EXIT_RUN, RunError, UserError
from oblr_megatron.runtime.processes import alive, boot_id, identity, pid_scope

HEARTBEAT_S = 10.0
STALE_S = 60.0  # a run on another machine is lost when its heartbeat is older than this
LOST_S = 120.0  # the same, while the file system keeps the lock
UNWATCHED_S = 600.0  # a heartbeat older than this is stale at once; clocks differ by less
ASKED_S = 1.0  # `check_unlocked` of another command holds the lock for a moment
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Owner:
    """The process of a run. Example: Owner(pid=4711, host="node3", process="5e1f...:4026531836:4711:8123", ...)"""

    pid: int
    host: str
    process: str  # boot of the machine, namespace of process ids, process id, start time in ticks
    since: float  # seconds since the epoch
    heartbeat: float

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        now = time.time()
        return cls(os.getpid(), socket.gethostname(), f"{pid_scope()}:{identity(os.getpid())}", now, now)

    @property
    def is_local(self) -> bool:
        """Whether it runs, or ran, under this kernel, maybe in another container."""
        return self.process.startswith(f"{boot_id()}:")

    def is_alive(self) -> bool:
        """Whether the process runs; in another container or machine, whether its heartbeat is recent."""
        if self.process.startswith(f"{pid_scope()}:"):
            return alive(self.process.removeprefix(f"{pid_scope()}:"))
        return time.time() - self.heartbeat < STALE_S

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {datetime.fromtimestamp(self.since):%Y-%m-%d %H:%M:%S}"


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory. It is created; directories created here are removed at the end if empty.

    Raises:
        UserError: another run holds the lock.
    """
    made = [place for place in (run_dir, *run_dir.parents) if not place.exists()]
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / LOCK_FILE
    try:
        descriptor = _take(path)
        try:
            with repeated(_heart(path, descriptor, Owner.me()), HEARTBEAT_S):
                yield
        finally:
            _release(path, descriptor)
    finally:
        for place in made:
            with suppress(OSError):  # not empty: the run wrote into it
                place.rmdir()


def check_unlocked(run_dir: Path) -> None:
    """Refuse a directory in which a run is training now; for the launcher, which holds no lock.

    Raises:
        UserError: names the run's process.
    """
    held, owner = holder(run_dir)
    if held:
        raise _held(run_dir, owner)


def holder(run_dir: Path) -> tuple[bool, Owner | None]:
    """Whether a run is training in a directory now, and who, if its lock says so."""
    with suppress(FileNotFoundError, NotADirectoryError):
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDONLY)
        try:
            _lock(descriptor, fcntl.LOCK_SH)
        except BlockingIOError:
            owner = _read(descriptor)
            return owner is None or owner.is_local or owner.is_alive(), owner
        finally:
            os.close(descriptor)
    return False, None


@contextmanager
def repeated(action: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `action` now and every so many seconds, in a thread; a full disk does not stop it."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            with suppress(OSError):
                action()

    with suppress(OSError):
        action()
    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _take(path: Path) -> int:
    """The descriptor of the locked file."""
    end = time.monotonic() + ASKED_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, fcntl.LOCK_EX)
            before = _read(descriptor)
            if before is not None and not before.is_local and _beats(path, before, 3 * HEARTBEAT_S):
                raise BlockingIOError
        except BlockingIOError:
            owner = _read(descriptor)
            error = _held(path.parent, owner)
            lost = owner is not None and not owner.is_local and not _beats(path, owner, LOST_S)
            if lost and _is_same(path, descriptor):
                path.unlink()  # the file server still holds the lock of a machine that died
            os.close(descriptor)
            if lost:
                continue
            if time.monotonic() > end:
                raise error from None
            time.sleep(0.1)
            continue
        if _is_same(path, descriptor):
            return descriptor
        os.close(descriptor)  # its owner removed it just now


def _lock(descriptor: int, kind: int) -> None:
    """Take the kernel's lock, or do nothing where the file system has none.

    Raises:
        BlockingIOError: another process holds it.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        owner = _read(descriptor)
        if owner is not None and owner.is_alive():
            raise BlockingIOError from None


def _beats(path: Path, owner: Owner, seconds: float) -> bool:
    """Whether a run on another machine is alive: its heartbeat changes within so many seconds."""
    if time.time() - owner.heartbeat > UNWATCHED_S:
        return False
    print(f"waiting up to {seconds:.0f} s for a heartbeat of {owner}", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(1.0)
        if (now := _owner_at(path)) is not None and now != owner:
            return True
    return False


def _release(path: Path, descriptor: int) -> None:
    with suppress(OSError):
        if _is_same(path, descriptor):
            path.unlink()
    os.close(descriptor)


def _is_same(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _heart(path: Path, descriptor: int, owner: Owner) -> Callable[[], None]:
    """A function that writes the heartbeat. It ends this process if another run has taken the lock since."""
    is_ours = False

    def beat() -> None:
        nonlocal is_ours
        other = _owner_at(path)
        if is_ours and other is not None and other.process != owner.process:
            error = RunError(
                f"another run took the lock of run_dir while this machine stood still: {other} [{path.parent}]. "
                "Fix: leave it to the other run; this one has ended without a save"
            )
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(EXIT_RUN)  # a save or an export would damage the files of the other run
        _write(descriptor, owner)
        is_ours = True

    return beat


def _write(descriptor: int, owner: Owner) -> None:
    text = json.dumps(asdict(owner) | {"heartbeat": time.time()}, indent=2)
    os.pwrite(descriptor, f"{text:<512}\n".encode(), 0)  # one write of equal length: readers see old or new
    os.fsync(descriptor)  # a network file system would keep it for half a minute, as long as others look for it


def _owner_at(path: Path) -> Owner | None:
    """The owner that a file names now. Opening it again makes NFS show what other machines wrote."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return _read(descriptor)
        finally:
            os.close(descriptor)
    return None


def _read(descriptor: int) -> Owner | None:
    try:
        return Owner(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):  # empty: its owner has just created it
        return None


def _held(run_dir: Path, owner: Owner | None) -> UserError:
    return UserError(
        f"another run writes into run_dir{'' if owner is None else f': {owner}'}",
        where=str(run_dir),
        fix="wait until it has ended, stop it, or name another run_dir",
    )
