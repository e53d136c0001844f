"""torchrun for a run that saves before it ends.

    python -m oblr_megatron.runtime.launch [torchrun's options] -m oblr_megatron.train CONFIG.toml [KEY=VALUE ...]

SIGTERM and SIGUSR1 are handed on to the ranks of this node, which finish their step, save, and end with status 0; and
so does this. torchrun alone answers SIGTERM by ending its ranks, after 30 s with SIGKILL, and dies of SIGUSR1. A second
SIGTERM still does what torchrun does with it, and so does a signal that comes before there are ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from oblr_megatron.errors import EXIT_OK, EXIT_USER
from oblr_megatron.runtime.stopping import REPEAT_S, SIGNALS

LATER_S = 2 * REPEAT_S  # a rank counts from a little later, and shall not take a second SIGTERM for the first
TORCHRUN_HANDLES = "SIGINT,SIGHUP,SIGQUIT"  # what is left of its own list
EXIT_SIGNAL = 128  # plus the number, as a shell says it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run to the end; the exit status: 2 where that is what the ranks ended with, having said why.

    Raises:
        ChildFailedError: torchrun's, of a rank that failed otherwise.
    """
    forward = Forward()
    for number in SIGNALS:
        signal.signal(number, forward)
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        torchrun([f"--signals-to-handle={TORCHRUN_HANDLES}", *given])
    except SignalException as error:
        print(f"error: ended by {error.sigval.name}", file=sys.stderr)
        return EXIT_SIGNAL + error.sigval
    except ChildFailedError as error:
        ended_with = {failure.exitcode for failure in error.failures.values()}
        if ended_with - {-signal.SIGTERM} != {EXIT_USER}:  # torchrun ends those that have not ended yet
            raise
        return EXIT_USER
    return EXIT_OK


class Forward:
    """Signal handler that hands signals on to the processes this one has started.

    Raises:
        SignalException: there are none, or it is a SIGTERM later than LATER_S after the first; torchrun ends all.
    """

    def __init__(self) -> None:
        self._terminated_at: float | None = None  # the first SIGTERM, monotonic clock

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now, children = time.monotonic(), children_of(os.getpid())
        again = number == signal.SIGTERM and self._terminated_at is not None and now - self._terminated_at > LATER_S
        if again or not children:
            raise SignalException(f"process {os.getpid()} got signal {number}", signal.Signals(number))
        if number == signal.SIGTERM and self._terminated_at is None:
            self._terminated_at = now
        for child in children:
            with suppress(ProcessLookupError):  # it ended since
                os.kill(child, number)


def children_of(pid: int) -> list[int]:
    """Process ids of the living children of all threads of a process, zombies included."""
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


if __name__ == "__main__":
    sys.exit(main())
