"""Identity and family of processes, read from /proc. Imports no torch.

A process id alone does not identify a process, because the kernel reuses ids. An `identity` adds the start time.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

LAUNCHER = "OBLR_MEGATRON_LAUNCHER"  # identity of the launcher, set for its ranks
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun for its ranks
SAFE_PATH = {"PYTHONSAFEPATH": "oblr_megatron"}  # as `python -P`; our value, so that we remove no one else's
PR_SET_PDEATHSIG = 1  # linux/prctl.h
INIT = 1


def identity(pid: int) -> str:
    """Process id and start time in clock ticks since boot. Example: "4711:8123456".

    Raises:
        ProcessLookupError: there is no such process.
    """
    return f"{pid}:{_stat(pid)[19]}"  # field 22 of proc(5)


def alive(of: str) -> bool:
    """Whether the process with this identity runs. A zombie does not."""
    with suppress(ProcessLookupError):
        pid = int(of.partition(":")[0])
        return identity(pid) == of and _stat(pid)[0] != "Z"
    return False


def boot_id() -> str:
    """Identifies this machine since its start."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def pid_namespace() -> int:
    """The namespace in which this process has its id; containers on one machine have different ones."""
    return os.stat("/proc/self/ns/pid").st_ino


def pid_scope() -> str:
    """Boot id and pid namespace; process ids compare only within it. Example: "5e1f...:4026531836"."""
    return f"{boot_id()}:{pid_namespace()}"


def short_pid_scope() -> str:
    """Eight characters of a digest of `pid_scope`, for names of files."""
    return hashlib.sha256(pid_scope().encode()).hexdigest()[:8]


def started_at(pid: int) -> float:
    """Start time of a process, seconds since the epoch."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def children_of(pid: int) -> list[int]:
    """Process ids of all children of a process, over all its threads, zombies included."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            children += [int(child) for child in task.read_text().split()]
    return children


def raise_open_files() -> None:
    """Let this process and its children open as many files as they may.

    A soft limit is usually 1,024. A rank has a connection to every other rank, in each of several groups.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # a system that has lowered its own limit (fs.nr_open) refuses
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def python_module(module: str) -> list[str]:
    """The command that runs a module; a file in the current directory hides no module of Python or of a library."""
    return [sys.executable, "-P", "-m", module]


def directory_last() -> None:
    """Make the current directory the last place from which this process imports, as it is in the command itself."""
    here = os.getcwd()
    if not sys.flags.safe_path and sys.path[:1] in ([""], [here]):  # `python -m` has put it first
        del sys.path[0]
    if here not in sys.path:
        sys.path.append(here)


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process."""
    return TORCHRUN in environment


def die_with_launcher() -> None:
    """End this rank when its launcher ends, however that happens, also if it has ended already.

    Otherwise a surviving rank could write into the run directory while the resumed run does. Our launcher passes its
    identity. A plain torchrun does not. Then a rank with init as parent has lost its launcher.
    """
    if not launched():
        return
    parent = os.getppid()
    given = os.environ.get(LAUNCHER)
    if given is None and parent == INIT and b"torch" not in Path("/proc/1/cmdline").read_bytes():
        os._exit(0)  # in a container, torchrun itself may be process 1
    die_with(parent if given is None else int(given.partition(":")[0]))
    if given is not None and not alive(given):
        os._exit(0)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel for a signal when the parent ends, and exit at once if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(0)


def lost_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether another rank of this node has ended: torchrun then sends SIGTERM to the remaining ones."""
    if not launched(environment):
        return False
    return len(ranks_of(os.getppid())) < int(environment.get("LOCAL_WORLD_SIZE", "1"))


def ranks_of(launcher: int) -> list[int]:
    """Process ids of a launcher's living ranks. In a container it is process 1, and has orphans as children, too."""
    ranks = []
    for child in children_of(launcher):
        with suppress(OSError):  # it has just ended
            if b"\0LOCAL_RANK=" in b"\0" + Path(f"/proc/{child}/environ").read_bytes():  # empty for a zombie
                ranks.append(child)
    return ranks


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, from field 3 on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    return text.rpartition(")")[2].split()
