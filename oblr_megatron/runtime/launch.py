"""torchrun with signal forwarding, so that a run saves a checkpoint before it ends.

    python -m oblr_megatron.runtime.launch [torchrun's options] -m oblr_megatron.step_loop CONFIG.toml [KEY=VALUE ...]

SIGINT, SIGHUP, SIGTERM and SIGUSR1 are forwarded to the ranks of this node. They finish their step, save and end with
status 0, and so does the launcher. torchrun alone would end its ranks (after 30 s with SIGKILL). A second SIGINT,
SIGHUP or SIGTERM, or a signal before the ranks exist, ends everything at once.

A failure prints one line. torch's own messages go to RUN_DIR/logs/launcher.log. After a rank has failed, the launcher
ends within ENDS_S, also where the other nodes cannot be reached any more. One node more than --nnodes ends at once.
Nodes may start MEET_S apart.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from oblr_megatron.checks.run_dir import LOGS
from oblr_megatron.config import load_config
from oblr_megatron.errors import EXIT_OK, EXIT_RUN, EXIT_SIGNAL, EXIT_USER, UserError
from oblr_megatron.runtime.command_line import add_run_arguments, run_overrides
from oblr_megatron.runtime.processes import LAUNCHER, SAFE_PATH, children_of, identity, raise_open_files, ranks_of
from oblr_megatron.runtime.stopping import ENDING, KEY_REPEAT_S, REPEAT_S, handled
from oblr_megatron.runtime.streams import outlast_readers
from oblr_megatron.runtime.temporary import own_tmpdir

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

LATER_S = 2 * REPEAT_S  # longer than REPEAT_S, because ranks get the first SIGTERM a little later
KEY_LATER_S = 2 * KEY_REPEAT_S
ENDS_S = 45.0
"""Seconds that torchrun has to end the other ranks of a node (SIGKILL after 30 s) and to leave the rendezvous. Each
call of a store on a node that is cut off takes a minute."""
MEET_S = 300.0
"""Seconds in which the first node must answer, as in the preflight (OBLR_PREFLIGHT_S). torch alone waits a minute for
it. The first node waits longer for the others."""
LOOK_S = 0.5  # between two looks for new ranks or the first node
MEETING = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
SPARE = "added itself to the redundancy list"
"""torch says so of a node that comes when all are there. The node would wait for the whole run, and end in an
AttributeError: in torch 2.13 its launcher gets no result."""
RANK = "oblr_megatron.runtime.rank"
TRAIN = "oblr_megatron.step_loop"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun; returns the exit status, which is 2 if a rank ended with 2 and printed the reason."""
    outlast_readers()
    forward = Forward()
    for number in handled():
        signal.signal(number, forward)
    raise_open_files()
    os.environ.update({LAUNCHER: identity(os.getpid()), **SAFE_PATH})
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core: communication starts before its overlap
    with own_tmpdir():
        return _torchrun(sys.argv[1:] if arguments is None else list(arguments), forward)


def _torchrun(given: Sequence[str], forward: Forward) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    options = parse_args(["--signals-to-handle=SIGQUIT", *given])
    if options.rdzv_endpoint and options.nnodes != "1":
        # torch would tell all nodes socket.getfqdn() of one, which Debian's /etc/hosts makes a loopback address
        options.local_addr = options.local_addr or os.environ.get("SLURMD_NODENAME")
    log = _Log(_run_dir(options.training_script, options.training_script_args))
    target = ["-m"] * options.module + [options.training_script]
    options.training_script_args = [*target, *options.training_script_args]
    options.training_script, options.module = RANK, True
    try:
        forward.error = SignalException
        if not options.max_restarts:
            threading.Thread(target=_end_after_failures, args=(log,), daemon=True).start()
        if forward.early is not None:
            raise SignalException("a signal before torchrun was imported", forward.early)
        if options.rdzv_backend == "c10d" and options.rdzv_endpoint:
            _await_first_node(options.rdzv_endpoint)
        run(options)
    except SignalException as error:
        print(f"error: ended by {error.sigval.name}", file=sys.stderr)
        return EXIT_SIGNAL + error.sigval
    except ChildFailedError as error:
        statuses = {failure.exitcode for failure in error.failures.values()}
        if EXIT_USER in statuses:
            return EXIT_USER
        for number in ENDING:  # before the first step
            if EXIT_SIGNAL + number in statuses:
                print(f"error: ended by {number.name}", file=sys.stderr)
                return EXIT_SIGNAL + number
        log.keep(str(error))
        _print_failure(error, log)
        return EXIT_RUN
    except (DistError, RendezvousError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        place = f" at {options.rdzv_endpoint}" if options.rdzv_endpoint else ""
        fix = "give a free --master-port, and a first node that all nodes reach"
        print(f"error: the launchers cannot meet{place}: {reason}. Fix: {fix}", file=sys.stderr)
        return EXIT_RUN
    return EXIT_OK


def _await_first_node(endpoint: str) -> None:
    """Wait until another node's store answers; after MEET_S torchrun tries it once more, and says what fails."""
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

    address, end = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT), time.monotonic() + MEET_S
    if _matches_machine_hostname(address[0]):  # torch asks the same, and then starts the store here
        return
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(address, timeout=10.0):
            return
        time.sleep(LOOK_S)


def _end_after_failures(log: _Log) -> None:
    """Watch the ranks, and end this process if torchrun does not within ENDS_S after one has failed."""
    watched: set[int] = set()
    while True:
        for rank in set(ranks_of(os.getpid())) - watched:
            watched.add(rank)
            threading.Thread(target=_end_after_failure, args=(rank, log), daemon=True).start()
        time.sleep(LOOK_S)


def _end_after_failure(rank: int, log: _Log) -> None:
    """Wait for a rank's end, and leave its status for torchrun. With this process, other ranks end as well."""
    with suppress(ChildProcessError):  # torchrun was faster
        ended = os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT)
        if ended is None or not ended.si_status:
            return
        time.sleep(ENDS_S)
        text = f"a rank has failed, and the other nodes did not answer the launcher for {ENDS_S:g} s"
        log.keep(text)
        print(f"error: {text}", file=sys.stderr, flush=True)
        os._exit(EXIT_USER if (ended.si_code, ended.si_status) == (os.CLD_EXITED, EXIT_USER) else EXIT_RUN)


def _print_failure(error: ChildFailedError, log: _Log) -> None:
    """A rank that was killed could not say so itself; other failed ranks have printed their own line."""
    killed = [failure for failure in error.failures.values() if failure.exitcode < 0]
    if killed:
        first = min(killed, key=lambda failure: failure.timestamp)
        name = signal.Signals(-first.exitcode).name
        rank = next(rank for rank, failure in error.failures.items() if failure is first)
        where = "" if log.path is None else f"; see {log.path}"
        print(f"error: rank {rank} (process {first.pid}) was ended by {name}{where}", file=sys.stderr)


class Forward:
    """Signal handler that forwards signals to the child processes.

    Before torchrun is imported, a first signal is kept in `early`: an exception in the middle of torch's import can end
    the process with another status.

    Raises:
        SystemExit: a second signal comes before torchrun is imported.
        SignalException: there are no children yet, or one of ENDING comes again, LATER_S or more after the first.
            torchrun then ends all ranks.
    """

    def __init__(self) -> None:
        self.error: type[Exception] | None = None  # torchrun's SignalException, once it is imported
        self.early: signal.Signals | None = None
        self._ending_at: float | None = None  # the first of ENDING, monotonic clock

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now, children = time.monotonic(), children_of(os.getpid())
        later = KEY_LATER_S if number == signal.SIGINT else LATER_S
        again = number in ENDING and self._ending_at is not None and now - self._ending_at > later
        if again or not children:
            if self.error is not None:
                raise self.error(f"process {os.getpid()} got signal {number}", signal.Signals(number))
            if self.early is not None:
                print(f"error: ended by {signal.Signals(number).name}", file=sys.stderr)
                raise SystemExit(EXIT_SIGNAL + number)
            self.early = signal.Signals(number)
            return
        if number in ENDING and self._ending_at is None:
            self._ending_at = now
        for child in children:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(child, number)


class _Log(logging.Handler):
    """Takes torch.distributed's log off the console, and writes it to a file when a run failed.

    It also takes what Python cannot raise: when torchrun ends, its keep-alive thread may try to join itself.
    """

    def __init__(self, run_dir: Path | None) -> None:
        super().__init__()
        self.path = None if run_dir is None else run_dir / LOGS / "launcher.log"
        self._lines: list[str] = []
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed."):
                logging.getLogger(name).handlers.clear()
        logging.getLogger(MEETING).setLevel(logging.DEBUG)
        top = logging.getLogger("torch.distributed")
        top.handlers, top.propagate = [self], False
        sys.unraisablehook = lambda event: self._lines.append(f"ignored in {event.object!r}: {event.exc_value!r}")

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.DEBUG:
            self._lines.append(self.format(record))
        elif SPARE in record.getMessage():
            fix = "start the launcher once on each of --nnodes nodes"
            print(f"error: a node too many: --nnodes others have met already. Fix: {fix}", file=sys.stderr, flush=True)
            os._exit(EXIT_USER)  # an exception would close the meeting for the others

    def keep(self, text: str) -> None:
        """Write the log and a text into the run directory; print them where the target is not a run."""
        if self.path is None:
            print(text, *self._lines, sep="\n", file=sys.stderr)
            return
        if not self.path.parent.parent.is_dir():
            self.path = None  # the failed run made no directory
            return
        with suppress(OSError):  # a full disk
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in [*self._lines, text])


def _run_dir(script: str, arguments: Sequence[str]) -> Path | None:
    """The run directory of a training run; None for another script, or where its config is wrong."""
    if script != TRAIN:
        return None
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_run_arguments(parser)
    try:
        options, rest = parser.parse_known_args(list(arguments))
        options.overrides += rest
        return load_config(options.config, run_overrides(options)).run_dir
    except (UserError, argparse.ArgumentError, SystemExit):  # the ranks report it
        return None


if __name__ == "__main__":
    sys.exit(main())
