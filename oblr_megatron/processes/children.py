"""End everything that a reward function has started: programs, forks, and daemons in sessions of their own.

    become_subreaper()
    ...                # the function starts whatever it likes
    end_children()

A subreaper (prctl(2)) adopts the orphans among its descendants. So a subreaper without children has no descendants,
and killing its children until there are none ends every descendant, however it was started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Set
from contextlib import suppress

from oblr_megatron.runtime.processes import children_of

END_S = 5.0
"""Time for killed processes to end. A process that waits for a device ends only when the device answers."""
PAUSE_S = 0.001
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def become_subreaper() -> None:
    """Adopt the orphans among the descendants of this process. A fork does not inherit this.

    Raises:
        OSError: the kernel refuses; Linux has allowed it since version 3.4.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_children(keep: Set[int] = frozenset()) -> bool:
    """Kill the children of this process, except those in `keep`, with all their descendants. Needs a subreaper.

    Costs one system call if there are no children.

    Returns:
        Whether all have ended; False after END_S.
    """
    give_up_at = time.monotonic() + END_S
    while _has_children():
        others = [pid for pid in children_of(os.getpid()) if pid not in keep]
        if keep and not others:
            return True
        for pid in others:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if sum(map(has_ended, others)) == 0:
            time.sleep(PAUSE_S)
        if time.monotonic() > give_up_at:
            return False
    return True


def has_ended(pid: int) -> bool:
    """Whether a child has ended; reaps it."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # reaped by the reward function
        return True


def _has_children() -> bool:
    """Whether this process has children; zombies count."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
