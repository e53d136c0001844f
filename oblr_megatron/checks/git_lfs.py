"""Files of which a clone without Git LFS has only the pointer (https://git-lfs.com/spec). Imports no torch."""

from __future__ import annotations

from pathlib import Path

from oblr_megatron.errors import UserError

POINTER = b"version https://git-lfs.github.com/spec/"  # a pointer begins with it


def refuse_pointer(file: Path) -> None:
    """Refuse a pointer. A file that cannot be opened passes, because its reader says more.

    Raises:
        UserError: the file is a pointer.
    """
    try:
        with file.open("rb") as stream:
            begins = stream.read(len(POINTER))
    except OSError:
        return
    if begins == POINTER:
        fix = "run `git lfs install` and `git lfs pull` in the clone"
        raise UserError("this is a Git LFS pointer, not the file", where=str(file), fix=fix)
