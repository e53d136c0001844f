"""Whether a run may write into its directory, and a command into its target. Imports no torch."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from oblr_megatron.errors import UserError
from oblr_megatron.formatting import searched_from

CONFIG_FILE = "config.json"
"""The resolved configuration in a run directory; it marks the directory of a run."""
CHECKPOINTS = "checkpoints"
"""Folder in a run directory with its checkpoints."""
ROLLOUTS = "rollouts"
EVALUATIONS = "evaluations"
"""Folder in a run directory with its saved samples."""
LOCK_FILE = "lock.json"
"""Lock of a run directory, see runtime/run_lock.py."""
LOGS = "logs"
"""Folder in a run directory with the output of engines and of torch's launcher."""
EXPORTS = ("hf", "hf_best")
"""Directories in a run directory with exported models. Each may be a link to another disk."""
ADAPTERS = {"hf": "adapter", "hf_best": "adapter_best"}
"""Directories with the adapters of an export, with LoRA."""
UNSTARTED = {LOCK_FILE, LOGS}
"""Left by a run that ended while it was opened, for example while its engine started."""


def check_run_dir(run_dir: Path, *, holds_run: bool = False) -> None:
    """Refuse a directory that holds something, or is not writable. A run that never started left nothing of value.

    Args:
        run_dir: directory, absent or empty.
        holds_run: whether it may hold a run to resume.

    Raises:
        UserError: names the obstacle.
    """
    if os.path.exists(run_dir) and not os.path.isdir(run_dir):  # unlike Path's, these raise nothing
        raise UserError("run_dir is a file", where=str(run_dir), fix="name a directory")
    check_writable(run_dir, "run_dir")
    for name in (CHECKPOINTS, ROLLOUTS, LOGS):  # an earlier attempt may have run as another user
        check_writable(run_dir / name, f"the run's folder {name}")
    inside = run_dir.iterdir() if run_dir.is_dir() else ()
    links = {*EXPORTS, *ADAPTERS.values()}  # made before the first start, to a directory that is still empty
    held = {path.name for path in inside if not (path.name in links and path.is_symlink() and not filled(path))}
    held -= UNSTARTED
    filled_link = next((run_dir / name for name in sorted(held & links) if (run_dir / name).is_symlink()), None)
    if filled_link is not None and held <= links:
        what = "the link of an export names a directory that is not empty"
        raise UserError(what, where=str(filled_link), fix="link it to an empty directory")
    resumable = CONFIG_FILE in held or any((run_dir / CHECKPOINTS).glob("step_*"))
    if held and not (holds_run and resumable):
        raise UserError(
            "run_dir holds a run" if resumable else "run_dir holds something other than a run",
            where=str(run_dir),
            fix="resume it with --resume, or name a new directory" if resumable else "name a new or an empty directory",
        )


def filled(directory: Path) -> bool:
    """Whether a directory, or what a link names, exists and holds something."""
    return directory.exists() and not (directory.is_dir() and next(directory.iterdir(), None) is None)


def check_shared(run_dir: Path, seconds: float) -> None:
    """Refuse a run directory in which this node does not see the lock that rank 0 has made there.

    Args:
        run_dir: directory of the run.
        seconds: how long to look; NFS may remember for a minute that the file was absent.

    Raises:
        UserError: it does not appear. A checkpoint could not be written.
    """
    end = time.monotonic() + seconds
    while not os.path.exists(run_dir / LOCK_FILE):
        if time.monotonic() > end:
            what = f"{socket.gethostname()} does not see the run directory of rank 0"
            raise UserError(what, where=str(run_dir), fix="put run_dir on a file system that all nodes share")
        time.sleep(0.5)


def check_writable(path: Path, name: str) -> None:
    """Refuse a directory, `name` in the message, that cannot be created, or be read and written if it exists.

    Raises:
        UserError: names the nearest obstacle.
    """
    present = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))
    wanted = os.W_OK | os.X_OK | (os.R_OK if present == path.absolute() else 0)
    if not os.path.isdir(present) or not os.access(present, wanted):
        raise UserError(
            f"{name} cannot be created: {present} is not a writable directory",
            where=str(path),
            fix="name a directory that you can write to",
        )


def check_saved_samples(directory: Path) -> None:
    """Refuse a `rollout.replay` that is not there.

    Raises:
        UserError: with what was meant, if the path is relative.
    """
    if not directory.is_dir():
        fix = f"give the rollouts/ of a run with --save-rollouts{searched_from(directory)}"
        raise UserError("the directory of saved samples does not exist", where=str(directory), fix=fix)
