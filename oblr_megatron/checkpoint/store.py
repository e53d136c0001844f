"""Checkpoint directories on disk: atomic creation, detection of damage, removal of old ones. Imports no torch.

    RUN_DIR/checkpoints/step_00000010/            appears by one rename, after every file was written and synced
        checkpoint.json                           the manifest: step, trainer state, size and xxh3 of every file
        ...                                       the files that the manifest lists, e.g. common.pt, hf/config.json
    RUN_DIR/checkpoints/.step_00000020.node7-3f1c2a9b-4242-0.partial/      see partials.py

The manifest has one canonical form and contains its own checksum, so a single changed byte is detected.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from oblr_megatron.checkpoint.hf_dir import HFDir
from oblr_megatron.checkpoint.partials import REPLACED, partial_names, remove, sweep
from oblr_megatron.checks.run_dir import CHECKPOINTS, check_writable
from oblr_megatron.config import Config
from oblr_megatron.errors import NO_SPACE, RunError, UserError
from oblr_megatron.formatting import size
from oblr_megatron.memory.rank_shapes import ELEMENT_BYTES
from oblr_megatron.memory.training import optimizer_bytes
from oblr_megatron.runtime.run_lock import repeated
from oblr_megatron.weights.adapter import AdapterShape, adapter_shapes
from oblr_megatron.weights.names import ModelShape

MANIFEST = "checkpoint.json"
FORMAT, VERSION = "oblr_megatron", 2
FIXED_BYTES = 16 * 2**20  # tokenizer and metadata of a checkpoint
TOUCH_S = 300.0  # between changes of a partial directory, which show another host that its writer lives
RESERVE_FRACTION, RESERVE_BYTES = 0.02, 64 * 2**20  # free space required beyond a checkpoint's size
FIX = "resume from another checkpoint, or restore this one from an intact copy"

_STEP = re.compile(r"step_(\d{8,})")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


class CheckpointError(UserError):
    """An unusable checkpoint; `where` names the file."""


class UnreadError(CheckpointError):
    """A checkpoint that cannot be read now and may be intact, e.g. while a network file system fails over."""


class NoSpaceError(RunError):
    """The disk or the quota is full, or would be."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Expected size and checksum of a file. Example: FileEntry(2, "99aa06d3014798d86001c324468d497f")"""

    num_bytes: int
    xxh3: str  # 128 bits, hexadecimal


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a checkpoint.

    Example: Manifest(step=10, files={"common.pt": FileEntry(...), "hf/config.json": FileEntry(...)}, state={"seed": 1})
    """

    step: int
    files: dict[str, FileEntry]  # by path inside the directory, with "/"
    state: dict[str, Any]  # the trainer's state as plain JSON: keys are strings


def step_name(step: int) -> str:
    """Directory of a step's checkpoint. Example: step_name(10) == "step_00000010"."""
    return f"step_{step:08d}"


@contextmanager
def writing(where: Path) -> Iterator[None]:
    """Turn an OSError of the block into a one-line error.

    Raises:
        NoSpaceError: the disk or the quota is full.
        RunError: any other OSError.
    """
    try:
        yield
    except OSError as error:
        what = f"cannot write {error.filename or where}: {error.strerror or error}"
        raise (NoSpaceError if error.errno in NO_SPACE else RunError)(what) from error


def check_absent(target: Path) -> None:
    """Refuse to overwrite anything but an empty directory, and a target that cannot be created.

    Raises:
        UserError: names the obstacle.
    """
    if target.name in ("", ".."):  # a partial directory could not be renamed to it
        what = "the current directory, or a parent, cannot be the target"
        raise UserError(what, where=str(target), fix="name a new directory")
    _check_no_mount(target)
    listed = os.path.isdir(target) and not os.path.islink(target) and os.access(target, os.R_OK)
    if listed and not os.listdir(target):
        target = target.parent  # where the target is written, to be renamed
    elif os.path.lexists(target):
        raise UserError("the target exists", where=str(target), fix="choose a new directory, or remove this one")
    check_writable(target, "the target")


def check_replaceable(target: Path) -> None:
    """Refuse a target that can neither be created nor be replaced as a whole directory. A link is followed.

    Raises:
        UserError: names the obstacle.
    """
    target = target.resolve()
    _check_no_mount(target)
    if target.is_dir():
        check_writable(target.parent, str(target))
    else:
        check_absent(target)


def _check_no_mount(target: Path) -> None:
    """A whole directory is renamed to its target at the end, which the system refuses for a mount point."""
    if os.path.ismount(target):
        raise UserError("the target is a mount point", where=str(target), fix="name a directory inside it")


@contextmanager
def partial_directory(target: Path) -> Iterator[Path]:
    """An empty directory next to `target`, which the block renames; removed if the block raises.

    Raises:
        NoSpaceError, RunError: writing failed.
    """
    sweep(target.parent)
    partial = begin(target)
    try:
        with repeated(lambda: os.utime(partial), TOUCH_S), writing(target):
            yield partial
    except BaseException:  # also on an interrupt
        shutil.rmtree(partial, ignore_errors=True)
        raise


def begin(target: Path) -> Path:
    """Create an empty partial directory next to `target`, to be filled and passed to `commit`.

    Raises:
        NoSpaceError, RunError: it cannot be created.
    """
    with writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        for partial in partial_names(target):
            try:
                partial.mkdir()
            except FileExistsError:
                continue
            return partial
    raise AssertionError("unreachable: partial_names is endless")


def measure(directory: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Size and checksum of files, read back from disk.

    Raises:
        RunError: a file cannot be read.
    """
    try:
        return {name: _entry(directory / name) for name in names}
    except OSError as error:
        raise RunError(f"cannot read back {error.filename or directory}: {error.strerror or error}") from error


def commit(partial: Path, target: Path, manifest: Manifest, *, replaces: bool = True) -> None:
    """Write the manifest, sync all files, and rename `partial` to `target`. It replaces an older one if `replaces`;
    otherwise one that has files stays, and this is an error.

    Raises:
        NoSpaceError, RunError: a write failed; `target` is unchanged, and `sweep` will remove `partial`.
    """
    with writing(partial):
        (partial / MANIFEST).write_bytes(_render(manifest))
        for path in (*partial.rglob("*"), partial):
            sync(path)
        put(partial, target, replaces=replaces)


def put(partial: Path, target: Path, *, replaces: bool) -> None:
    """Rename a written directory to `target`. An older one keeps the name until then, and is removed afterwards; unless
    `replaces`, one that has files is an error.

    Raises:
        OSError: a rename failed; `target` is unchanged.
    """
    if replaces and os.path.lexists(target):
        _exchange(partial, target)
    else:
        partial.rename(target)
    sync(target.parent)
    remove(partial)  # the older one, if there was one


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest and check that every file exists with its full size. `check_contents` reads the files.

    Raises:
        CheckpointError: the checkpoint does not exist or has another format, the manifest is damaged or of another
            version, or a file is missing or has another size.
    """
    if not directory.is_dir():
        what = "the checkpoint is a file, not a directory" if directory.exists() else "the checkpoint does not exist"
        raise CheckpointError(what, where=str(directory), fix="give the directory of a checkpoint")
    manifest = _parse(directory)
    for name, entry in manifest.files.items():
        _check_size(directory / name, entry)
    return manifest


def check_contents(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read files in full and compare them with the manifest.

    Raises:
        CheckpointError: a file differs, cannot be read, or is not listed; names the first one.
    """
    for name in names:
        file = directory / name
        if name not in manifest.files:
            raise CheckpointError(f"{MANIFEST} does not list this file", where=str(file), fix=FIX)
        try:
            entry = _entry(file)
        except OSError as error:
            raise _unread("cannot read the file", file, error) from error
        if entry != manifest.files[name]:
            what = f"the file is damaged: its checksum is {entry.xxh3}, {MANIFEST} has {manifest.files[name].xxh3}"
            raise CheckpointError(what, where=str(file), fix=FIX)


def checkpoints_of(run_dir: Path) -> list[Path]:
    """Committed checkpoints of a run, newest first. Contents are not verified here."""
    directory = run_dir / CHECKPOINTS
    return _committed(directory) if directory.is_dir() else []


def prune(committed: Path, keep_last: int, keep: Collection[Path], damaged: Collection[Path] = ()) -> None:
    """Remove the checkpoints older than the newest `keep_last` intact ones up to `committed`, except those in `keep`.

    Later steps stay and do not count: they are damaged, or an earlier process of the run wrote them. Each is renamed
    first, so that an interrupted removal leaves no damaged checkpoint. Of a link only the link is removed.

    Args:
        committed: the newest checkpoint of this process.
        keep_last: how many to keep, `committed` included.
        keep: never removed.
        damaged: known to be damaged inside a file of full size; wrong sizes are found here.

    Raises:
        RunError: a checkpoint cannot be renamed.
    """
    kept, intact = {path.resolve() for path in keep}, 0
    checkpoints = _committed(committed.parent)
    for old in checkpoints[checkpoints.index(committed) :]:
        if intact < keep_last:
            intact += old not in damaged and _has_full_size(old)
        elif old.resolve() not in kept:
            with writing(old):
                remove(old if old.is_symlink() else old.rename(_unused(partial_names(old))))


def checkpoint_bytes(model: HFDir, config: Config) -> int:
    """Size of a checkpoint: weights, fp32 masters if the weights are bf16, optimizer moments, average gradient.

    Of a run with adapters only these count. Example: Qwen3-8B in bf16 with Adam takes 8.19e9 * (2 + 4 + 8) = 115 GB.
    """
    lora, shapes = config.model.lora, model.shapes
    if lora.rank:
        shapes = adapter_shapes(ModelShape.of(model.config), AdapterShape(lora.rank, lora.targets))
    numbers = sum(map(prod, shapes.values()))
    return numbers * ELEMENT_BYTES[config.model.dtype] + optimizer_bytes(config, numbers) + FIXED_BYTES


def check_space(directory: Path, num_bytes: int, *, freed: int = 0) -> None:
    """Check that `directory`, which need not exist yet, has room for `num_bytes` and a reserve.

    `freed` bytes will be removed before.

    Raises:
        NoSpaceError: with the bytes needed and free.
    """
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize + freed
    needed = num_bytes + int(num_bytes * RESERVE_FRACTION) + RESERVE_BYTES
    if free < needed:
        raise NoSpaceError(f"no room: {size(needed)} needed, {size(free)} free in {existing}")


def _entry(file: Path) -> FileEntry:
    with file.open("rb", buffering=0) as stream:
        checksum = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
        return FileEntry(stream.tell(), checksum)


def _render(manifest: Manifest) -> bytes:
    return _seal({"format": FORMAT, "version": VERSION, **asdict(manifest)})


def _seal(content: dict[str, Any]) -> bytes:
    """Canonical JSON of the content, with its checksum added."""
    content = json.loads(json.dumps(content))  # as JSON reads it back: lists for tuples, string keys
    plain = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**content, "xxh3": xxhash.xxh3_128_hexdigest(plain)}, sort_keys=True, indent=1).encode()


def _parse(directory: Path) -> Manifest:
    file = directory / MANIFEST
    try:
        text = file.read_bytes()
        content = json.loads(text)
    except FileNotFoundError as error:
        raise _foreign(directory) from error
    except OSError as error:
        raise _unread("cannot read the file", file, error) from error
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8
        raise CheckpointError("the manifest is damaged: it is not JSON", where=str(file), fix=FIX) from error
    if not isinstance(content, dict) or (content.get("format") != FORMAT and "xxh3" not in content):
        fix = "give a checkpoint that oblr_megatron wrote"
        raise CheckpointError("the manifest is not oblr_megatron's", where=str(file), fix=fix)
    rest = {key: value for key, value in content.items() if key != "xxh3"}
    if text != _seal(rest):
        raise CheckpointError("the manifest is damaged: its checksum is wrong", where=str(file), fix=FIX)
    if rest["version"] != VERSION:
        what = f"the checkpoint has format version {rest['version']}, this program reads {VERSION}"
        fix = "use the oblr_megatron version that wrote it"
        raise CheckpointError(what, where=str(file), fix=fix)
    files = {name: FileEntry(**entry) for name, entry in rest["files"].items()}
    return Manifest(step=rest["step"], files=files, state=rest["state"])


def _foreign(directory: Path) -> CheckpointError:
    """The error for a directory without a manifest, by what it seems to be."""
    if (directory / ".metadata").exists():
        what = "it is a distributed checkpoint of another program"
        fix = "convert its weights to a Hugging Face directory (Megatron-LM's: oblr-megatron convert to-hf --hf-source)"
        fix += ", and set model.path to it"
    elif any(directory.glob("model*.safetensors*")):
        what, fix = "it is a Hugging Face directory", "set model.path to it, or convert to-megatron"
    else:
        what, fix = f"it has no {MANIFEST}", "give the directory of a checkpoint"
    return CheckpointError(f"not a checkpoint of this program: {what}", where=str(directory), fix=fix)


def _unread(what: str, file: Path, error: OSError) -> CheckpointError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return CheckpointError(f"{what}: {error.strerror}", where=str(file), fix=FIX)
    fix = "restore the disk or its mount and resume again, or remove this checkpoint to continue from an older one"
    return UnreadError(f"cannot read the file: {error.strerror}", where=str(file), fix=fix)


def _check_size(file: Path, entry: FileEntry) -> None:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise _unread("the file is missing", file, error) from error
    if size != entry.num_bytes:
        state = "cut off" if size < entry.num_bytes else "too long"
        what = f"the file is {state}: {size} bytes, {MANIFEST} has {entry.num_bytes}"
        raise CheckpointError(what, where=str(file), fix=FIX)


def _has_full_size(directory: Path) -> bool:
    try:
        read_manifest(directory)
    except CheckpointError:
        return False
    return True


def _committed(directory: Path) -> list[Path]:
    steps = [(int(named[1]), path) for path in directory.iterdir() if (named := _STEP.fullmatch(path.name))]
    return [path for step, path in sorted(steps, reverse=True) if path.is_dir() and path.name == step_name(step)]


def _unused(names: Iterator[Path]) -> Path:
    return next(name for name in names if not os.path.lexists(name))


def _exchange(partial: Path, target: Path) -> None:
    """Swap the names of two directories, atomically if the file system can. Otherwise a sweep repairs a kill."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = (_AT_FDCWD, os.fsencode(partial), _AT_FDCWD, os.fsencode(target))
    if libc.renameat2(*names, _RENAME_EXCHANGE) != 0:  # some network file systems do not support it
        replaced = target.rename(_unused(partial_names(target, REPLACED)))
        try:
            partial.rename(target)
        except OSError:
            replaced.rename(target)
            raise
        replaced.rename(partial)


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
