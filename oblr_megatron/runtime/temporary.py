"""A temporary directory of the command, so that nothing of it or of its libraries stays in TMPDIR. Imports no torch.

    with own_tmpdir():
        ...            # tempfile, vLLM's sockets and torchrun's logs of this process and its children

The name holds the identity of the process, and a short hash of the place where it is valid: other machines and
containers may have the same TMPDIR. A command that was ended by SIGKILL leaves its directory. The next command at the
same place removes it. If the name is too long for vLLM's sockets, these get a directory of the same name in /tmp.
"""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path

from oblr_megatron.errors import UserError
from oblr_megatron.runtime.processes import alive, identity, short_pid_scope

PREFIX = "oblr_megatron-"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
HOME_CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "FLASHINFER_WORKSPACE_BASE": "flashinfer"}
"""Variables of kernels' caches that are in the home directory by default, and what is cached there."""
SOCKETS = "VLLM_RPC_BASE_PATH"  # by default TMPDIR
SHORT = Path("/tmp")
LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000")  # bytes: a socket's path, without vLLM's name for it
GPU = Path("/dev/nvidiactl")


@contextmanager
def own_tmpdir() -> Iterator[Path]:
    """Make TMPDIR a directory of this process, and remove it at the end. A child keeps its parent's.

    A user id without a name, as in containers, gets one: torch asks for it at its import.

    Raises:
        UserError: there is no directory for temporary files.
    """
    try:
        outer = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        fix = "free space there, or set TMPDIR to a directory that can be written"
        raise UserError("no temporary file can be written", where="TMPDIR, /tmp, /var/tmp", fix=fix) from error
    own = _prefix() + identity(os.getpid()).replace(":", "-")
    if outer.name.startswith(PREFIX) and outer.name != own:
        yield outer
        return
    base = outer.parent if outer.name == own else outer  # `exec` keeps process and environment
    before = {name: os.environ.get(name) for name in ("TMPDIR", INDUCTOR_CACHE, *HOME_CACHES, SOCKETS, "USER")}
    _name_user()
    directory, sockets = base / own, SHORT / own
    directories = [directory]
    too_long = len(os.fsencode(directory)) > LONGEST and os.access(SHORT, os.W_OK)
    if too_long and os.environ.setdefault(SOCKETS, str(sockets)) == str(sockets):
        directories.append(sockets)
    for each in directories:
        _sweep(each.parent)
        each.mkdir(mode=0o700, exist_ok=True)
    if GPU.exists():  # kernels are compiled there, and their cache is kept between commands
        os.environ.setdefault(INDUCTOR_CACHE, str(base / f"torchinductor_{getpass.getuser()}"))
        if not os.access(os.path.expanduser("~"), os.W_OK):
            for name, library in HOME_CACHES.items():
                os.environ.setdefault(name, str(base / f"{library}_{getpass.getuser()}"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    try:
        yield directory
    finally:
        tempfile.tempdir = str(base)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        for each in directories:
            _remove(each)


def _remove(directory: Path) -> None:
    """Remove it now, or at exit if multiprocessing has a directory there, which it removes at exit itself."""
    if any(directory.glob("pymp-*")):
        after_multiprocessing = -200  # it has -100; a directory that is gone would be a traceback there
        Finalize(None, shutil.rmtree, (directory,), {"ignore_errors": True}, exitpriority=after_multiprocessing)
    else:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Remove the directories of processes that have ended; only /proc of their own place knows that."""
    for directory in base.glob(f"{_prefix()}*"):
        pid, _, start = directory.name.removeprefix(_prefix()).partition("-")
        with suppress(OSError):  # it belongs to another user, or has just been removed
            if pid.isdecimal() and directory.stat().st_uid == os.getuid() and not alive(f"{pid}:{start}"):
                shutil.rmtree(directory, ignore_errors=True)


def _prefix() -> str:
    """Start of the names at this place."""
    return f"{PREFIX}{short_pid_scope()}-"


def _name_user() -> None:
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())
