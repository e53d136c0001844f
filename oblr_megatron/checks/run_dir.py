"""Whether a run may write into its directory. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from oblr_megatron.errors import UserError

CONFIG_FILE = "config.json"
"""The resolved configuration in a run directory; it marks the directory of a run."""


def check_run_dir(run_dir: Path, *, holds_run: bool = False) -> None:
    """Refuse a directory that is not empty or not writable.

    Args:
        run_dir: directory, absent or empty.
        holds_run: whether it may hold a run to resume.

    Raises:
        UserError: names the obstacle.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError("run_dir is a file", where=str(run_dir), fix="name a directory")
    if run_dir.is_dir() and any(run_dir.iterdir()) and not (holds_run and (run_dir / CONFIG_FILE).exists()):
        what = "run_dir holds something other than a run" if holds_run else "run_dir is not empty"
        fix = "name a new directory, remove this one, or resume the run in it with --resume"
        raise UserError(what, where=str(run_dir), fix=fix)
    present = next(place for place in (run_dir.absolute(), *run_dir.absolute().parents) if os.path.lexists(place))
    if not present.is_dir() or not os.access(present, os.W_OK | os.X_OK):
        raise UserError(
            f"run_dir cannot be created: {present} is not a writable directory",
            where=str(run_dir),
            fix="name a directory that you can write to",
        )
