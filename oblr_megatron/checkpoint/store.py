"""Directories of checkpoints on disk: how one appears, how a damaged one is told, which ones go. Imports no torch.

    RUN_DIR/checkpoints/step_00000010/            appears by one rename, with every file in it written and synced
        checkpoint.json                           the manifest: step, trainer's state, size and xxh3 of every file
        ...                                       whatever the manifest lists, e.g. common.pt, hf/config.json
    RUN_DIR/checkpoints/.step_00000020.node7-4242-0.partial/      being written, or left by a process that was killed

A manifest is written in one exact form, carries a checksum of its own, and is refused if a single byte of it differs.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from oblr_megatron.errors import RunError, UserError
from oblr_megatron.formatting import size

CHECKPOINTS = "checkpoints"  # in the run directory
MANIFEST = "checkpoint.json"
FORMAT, VERSION = "oblr_megatron", 1
BLOCK_BYTES = 8 * 2**20  # read at a time
RESERVE_FRACTION, RESERVE_BYTES = 0.02, 64 * 2**20  # of free space, beyond what a checkpoint needs
FOREIGN_PARTIAL_S = 3600.0  # a partial of another host is left alone for so long after its last change
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
FIX = "resume from another checkpoint, or copy this one again from where it is whole"

_STEP = re.compile(r"step_(\d{8,})")
_PARTIAL = re.compile(r"\..+\.(?P<host>[^/]+)-(?P<pid>\d+)-\d+\.partial")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


class CheckpointError(UserError):
    """A checkpoint that cannot be used; `where` names the file."""


class NoSpaceError(RunError):
    """There is no room for a checkpoint."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a file of a checkpoint must be. Example: FileEntry(num_bytes=2, xxh3="99aa06d3014798d86001c324468d497f")"""

    num_bytes: int
    xxh3: str  # 128 bits, hexadecimal


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is in a checkpoint.

    Example: Manifest(step=10, files={"common.pt": FileEntry(...), "hf/config.json": FileEntry(...)}, state={"seed": 1})
    """

    step: int
    files: dict[str, FileEntry]  # by path inside the directory, with "/"
    state: dict[str, Any]  # the trainer's, plain JSON: the keys are strings


def step_name(step: int) -> str:
    """Directory of a step's checkpoint. Example: step_name(10) == "step_00000010"."""
    return f"step_{step:08d}"


@contextmanager
def writing(where: Path) -> Iterator[None]:
    """What the file system refuses in the block ends it in one line.

    Raises:
        NoSpaceError: the disk or the quota is full.
        RunError: anything else.
    """
    try:
        yield
    except OSError as error:
        what = f"cannot write {error.filename or where}: {error.strerror or error}"
        raise (NoSpaceError if error.errno in NO_SPACE else RunError)(what) from error


def begin(target: Path) -> Path:
    """A new empty directory beside `target`, to be filled and given to `commit`.

    Raises:
        NoSpaceError, RunError: the file system refuses.
    """
    with writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        for partial in _partial_names(target):
            try:
                partial.mkdir()
            except FileExistsError:
                continue
            return partial
    raise AssertionError("the numbers do not end")


def measure(directory: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Size and checksum of files, read back from the file system; the entries of a manifest.

    Raises:
        RunError: a file cannot be read.
    """
    try:
        return {name: _entry(directory / name) for name in names}
    except OSError as error:
        raise RunError(f"cannot read back {error.filename or directory}: {error.strerror or error}") from error


def commit(partial: Path, target: Path, manifest: Manifest) -> None:
    """Write the manifest, bring all to the disk, and give the directory its name; replaces an older `target`.

    Raises:
        NoSpaceError, RunError: the file system refuses; `target` is as it was, and `partial` is left to `sweep`.
    """
    with writing(partial):
        (partial / MANIFEST).write_bytes(_render(manifest))
        for path in (*partial.rglob("*"), partial):
            sync(path)
        if target.exists():
            _exchange(partial, target)
        else:
            partial.rename(target)
        sync(target.parent)
    shutil.rmtree(partial, ignore_errors=True)  # the older one, if there was one


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there in full size; their contents: `check_contents`.

    Raises:
        CheckpointError: there is no checkpoint, it is not one of ours, its manifest is damaged or of a newer version,
            or a file is missing or of another size.
    """
    if not directory.is_dir():
        what = "a checkpoint is a directory, this is a file" if directory.exists() else "there is no such checkpoint"
        raise CheckpointError(what, where=str(directory), fix="give the directory of a checkpoint")
    manifest = _parse(directory)
    for name, entry in manifest.files.items():
        _check_size(directory / name, entry)
    return manifest


def check_contents(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read files in full and hold them against the manifest.

    Raises:
        CheckpointError: names the first one that differs, cannot be read, or is not listed.
    """
    for name in names:
        file = directory / name
        if name not in manifest.files:
            raise CheckpointError(f"{MANIFEST} does not list the file", where=str(file), fix=FIX)
        try:
            found = _entry(file)
        except OSError as error:
            raise CheckpointError(f"cannot read the file: {error.strerror}", where=str(file), fix=FIX) from error
        if found != manifest.files[name]:
            raise CheckpointError(
                f"the file is damaged: its checksum is {found.xxh3}, {MANIFEST} says {manifest.files[name].xxh3}",
                where=str(file),
                fix=FIX,
            )


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The checkpoints of a run that were committed, the one of the last step first; whether whole, is not looked at."""
    directory = run_dir / CHECKPOINTS
    return _committed(directory) if directory.is_dir() else []


def sweep(directory: Path) -> None:
    """Remove what interrupted attempts left in `directory`; nothing of this process may be under way.

    What a living process may be writing stays: on this host, if there is a process of that number other than this one;
    of another host, until FOREIGN_PARTIAL_S after its last change.
    """
    for partial in directory.glob(".*.partial"):
        named = _PARTIAL.fullmatch(partial.name)
        if named is not None and partial.is_dir() and not _is_alive(partial, named["host"], int(named["pid"])):
            shutil.rmtree(partial, ignore_errors=True)  # what cannot be removed is tried again next time


def prune(directory: Path, keep_last: int, keep: Collection[Path]) -> None:
    """Remove the checkpoints in `directory` but the newest `keep_last` and those in `keep`.

    Each loses its name first, so that none is ever found half removed.

    Raises:
        RunError: the file system refuses.
    """
    kept = {path.resolve() for path in keep}
    for old in _committed(directory)[keep_last:]:
        if old.resolve() not in kept:
            with writing(old):
                shutil.rmtree(_retire(old), ignore_errors=True)


def check_space(directory: Path, num_bytes: int) -> None:
    """Is there room for `num_bytes` in `directory`, which need not exist yet, and for a reserve?

    Raises:
        NoSpaceError: names what is needed and what is free.
    """
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    needed = num_bytes + int(num_bytes * RESERVE_FRACTION) + RESERVE_BYTES
    if free < needed:
        raise NoSpaceError(f"no room for a checkpoint: {size(needed)} needed, {size(free)} free in {existing}")


def _partial_names(target: Path) -> Iterator[Path]:
    owner = f"{socket.gethostname()}-{os.getpid()}"
    return (target.with_name(f".{target.name}.{owner}-{number}.partial") for number in itertools.count())


def _entry(file: Path) -> FileEntry:
    checksum, size = xxhash.xxh3_128(), 0
    block = memoryview(bytearray(BLOCK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(block):
            checksum.update(block[:count])
            size += count
    return FileEntry(size, checksum.hexdigest())


def _render(manifest: Manifest) -> bytes:
    """The one form in which a manifest is written: canonical JSON, a checksum of the rest in it."""
    return _seal({"format": FORMAT, "version": VERSION, **asdict(manifest)})


def _seal(content: dict[str, Any]) -> bytes:
    content = json.loads(json.dumps(content))  # what reading it gives: no tuples, no keys but strings
    return json.dumps({**content, "xxh3": _checksum(content)}, sort_keys=True, indent=1).encode()


def _checksum(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _parse(directory: Path) -> Manifest:
    file = directory / MANIFEST
    try:
        text = file.read_bytes()
        content = json.loads(text)
    except FileNotFoundError as error:
        raise _foreign(directory) from error
    except OSError as error:
        raise CheckpointError(f"cannot read the manifest: {error.strerror}", where=str(file), fix=FIX) from error
    except ValueError as error:  # JSON and UTF-8 alike
        raise CheckpointError("the manifest is damaged: it is not JSON", where=str(file), fix=FIX) from error
    if not isinstance(content, dict) or (content.get("format") != FORMAT and "xxh3" not in content):
        raise CheckpointError("not a manifest of oblr_megatron", where=str(file), fix="give one of its checkpoints")
    rest = {key: value for key, value in content.items() if key != "xxh3"}
    if text != _seal(rest):
        raise CheckpointError("the manifest is damaged: its checksum is wrong", where=str(file), fix=FIX)
    if rest["version"] > VERSION:
        raise CheckpointError(
            f"the checkpoint is of version {rest['version']}, this program reads up to {VERSION}",
            where=str(file),
            fix="use the version of oblr_megatron that wrote it, or a newer one",
        )
    files = {name: FileEntry(**entry) for name, entry in rest["files"].items()}
    return Manifest(step=rest["step"], files=files, state=rest["state"])


def _foreign(directory: Path) -> CheckpointError:
    """What a directory without a manifest may be, and what to do with it."""
    if (directory / ".metadata").exists():
        what = "a distributed checkpoint of another program"
        fix = "convert its weights to a Hugging Face directory with the program that wrote it, and set model.path"
    elif any(directory.glob("model*.safetensors*")):
        what, fix = "a Hugging Face directory", "to start from its weights, set model.path"
    else:
        what, fix = "something else", "give the directory of a checkpoint"
    return CheckpointError(f"not a checkpoint but {what}: there is no {MANIFEST}", where=str(directory), fix=fix)


def _check_size(file: Path, entry: FileEntry) -> None:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"the file is missing: {error.strerror}", where=str(file), fix=FIX) from error
    if size != entry.num_bytes:
        state = "cut off" if size < entry.num_bytes else "too long"
        what = f"the file is {state}: {size} bytes, {MANIFEST} says {entry.num_bytes}"
        raise CheckpointError(what, where=str(file), fix=FIX)


def _committed(directory: Path) -> list[Path]:
    steps = [(int(named[1]), path) for path in directory.iterdir() if (named := _STEP.fullmatch(path.name))]
    return [path for step, path in sorted(steps, reverse=True) if path.is_dir() and path.name == step_name(step)]


def _is_alive(partial: Path, host: str, pid: int) -> bool:
    if host == socket.gethostname():
        return pid != os.getpid() and Path(f"/proc/{pid}").exists()
    try:
        changes = [path.lstat().st_mtime for path in (partial, *partial.rglob("*"))]
    except OSError:  # its owner has just moved something
        return True
    return time.time() - max(changes) < FOREIGN_PARTIAL_S


def _retire(old: Path) -> Path:
    """Take a checkpoint's name away."""
    retired = next(name for name in _partial_names(old) if not name.exists())
    return old.rename(retired)


def _exchange(partial: Path, target: Path) -> None:
    """Swap the names of two directories, at once where the file system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = (_AT_FDCWD, os.fsencode(partial), _AT_FDCWD, os.fsencode(target))
    if libc.renameat2(*names, _RENAME_EXCHANGE) != 0:  # not every file system of a cluster knows it
        retired = _retire(target)
        partial.rename(target)
        retired.rename(partial)


def sync(path: Path) -> None:
    """Bring a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
