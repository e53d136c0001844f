"""torchrun with signal forwarding, so that a run saves a checkpoint before it ends.

    python -m oblr_megatron.runtime.launch [torchrun's options] -m oblr_megatron.train CONFIG.toml [KEY=VALUE ...]

SIGTERM and SIGUSR1 are forwarded to the ranks of this node. They finish their step, save and end with status 0, and so
does the launcher. torchrun alone would end its ranks on SIGTERM (after 30 s with SIGKILL) and die of SIGUSR1. A second
SIGTERM, or a signal before the ranks exist, has torchrun's usual effect.
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

LATER_S = 2 * REPEAT_S  # longer than REPEAT_S, because ranks get the first SIGTERM a little later
TORCHRUN_HANDLES = "SIGINT,SIGHUP,SIGQUIT"  # torchrun's own list without SIGTERM
EXIT_SIGNAL = 128  # plus the signal number, as in a shell


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun; returns the exit status, which is 2 if the ranks ended with 2 and printed the reason.

    Raises:
        ChildFailedError: torchrun's error, if a rank failed otherwise.
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
        if ended_with - {-signal.SIGTERM} != {EXIT_USER}:  # torchrun ends the remaining ranks with SIGTERM
            raise
        return EXIT_USER
    return EXIT_OK


class Forward:
    """Signal handler that forwards signals to the child processes.

    Raises:
        SignalException: there are no children, or a SIGTERM comes more than LATER_S after the first. torchrun then ends
            all ranks.
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
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(child, number)


def children_of(pid: int) -> list[int]:
    """Process ids of all children of a process, over all its threads, zombies included."""
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


if __name__ == "__main__":
    sys.exit(main())
