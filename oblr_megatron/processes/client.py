"""Starts the fork server (fork_server.py) and asks it for workers. Imports no torch.

server = ForkServer("package.module:make", {"size": 3}, what="the workers", owner="rank 0", start_s=120.0)
worker = server.fork()      # serve(socket), with serve = make(size=3), in a process of its own
server.kill(worker)
server.close()
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from oblr_megatron.errors import DeadlineError, RunError
from oblr_megatron.formatting import log_tail
from oblr_megatron.processes.children import END_S
from oblr_megatron.processes.fork_server import FORK, KILL, MESSAGE_BYTES, PID_BYTES, READY

logger = logging.getLogger(__name__)

REQUEST_S = 30.0
"""Deadline for an answer of the fork server, which needs END_S to end processes."""
CLOSE_S = END_S + 5.0
"""Deadline for the supervisor, which needs END_S as well."""
PAUSE_S = 1.0
"""Pause before the second attempt, after a fork that failed for lack of memory or processes."""

_LAUNCH = "import json, os, sys; given = json.loads(sys.argv[1]); sys.path[:] = given.pop('path'); \
os.environ |= given.pop('environment'); \
from oblr_megatron.processes.fork_server import main; main(**given)"
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",  # it forks
}


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process and our end of its socket."""

    pid: int
    socket: socket.socket


class ForkError(RunError):
    """No worker was forked, in two attempts."""

    def __init__(self, message: str, *, ended: bool) -> None:
        self.ended = ended  # the fork server
        super().__init__(message)


class ForkServer:
    """A fork server and its supervisor. Any thread may call it."""

    def __init__(
        self,
        target: str,
        options: Mapping[str, object],
        *,
        what: str,
        owner: str,
        start_s: float,
        log: Path | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        """Start it and return; `fork` waits for its imports.

        Args:
            target, options: see `fork_server.main`.
            what: it is, for error messages.
            owner: who waits, for error messages.
            start_s: deadline for the imports, seconds.
            log: file for what its processes print; None discards what they print after the imports.
            inherited: descriptors that it inherits.
        """
        self._asked: dict[str, object] = {"target": target, "options": dict(options), "quiet": log is None}
        self._what, self._owner, self._start_s = what, owner, start_s
        self._log, self._inherited = log, inherited
        self._closed = False
        self._lock = threading.Lock()  # nothing is started while, or after, it is closed
        self._requests = threading.Lock()  # one request at a time
        self._start()

    def fork(self) -> Worker:
        """A new worker. If the fork server has ended, it is started once more.

        Raises:
            RunError: the workers' imports failed.
            ForkError: a second attempt to fork failed, or this is closed.
            DeadlineError: the imports take longer than `start_s`.
        """
        with self._requests:
            try:
                return self._fork()
            except ForkError as error:
                if self._closed:
                    raise
                logger.warning("a worker process could not be started and is tried once more: %s", error)
                if error.ended:
                    self._restart()
                else:
                    time.sleep(PAUSE_S)
            return self._fork()

    def kill(self, worker: Worker) -> None:
        """Kill a worker and everything it started. If the fork server has ended, so have its workers."""
        with self._requests:
            try:
                self._control.sendall(KILL + worker.pid.to_bytes(PID_BYTES, "little"))
                self._control.recv(1)
            except TimeoutError:
                self._end()  # `fork` starts it again
            except OSError:
                return
            except BaseException:  # such as Ctrl-C: the next request would read this one's answer
                self._end()
                raise

    def close(self) -> None:
        """End the fork server, all its workers and everything they started. May be called more than once."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._end()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {name: os.environ[name] for name in ("LOCAL_RANK",) if name in os.environ}  # `ranks_of` must not find it
        launch = {**self._asked, "descriptor": theirs.fileno(), "parent": os.getpid(), "path": sys.path}
        launch["environment"] = own
        with theirs, ExitStack() as files:
            output = None
            if self._log is not None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                output = files.enter_context(self._log.open("ab"))
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", "-c", _LAUNCH, json.dumps(launch)],
                pass_fds=[theirs.fileno(), *self._inherited],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={name: value for name, value in os.environ.items() if name not in own} | _ENVIRONMENT,
                start_new_session=True,  # Ctrl-C then reaches only the trainer, which closes this
            )
        self._ready_by: float | None = time.monotonic() + self._start_s  # None once it is ready

    def _restart(self) -> None:
        with self._lock:
            if self._closed:
                raise ForkError(f"{self._what} has been closed", ended=True)
            self._end()
            try:
                self._start()
            except OSError as error:
                raise ForkError(f"{self._what} cannot be started again: {error}", ended=True) from error

    def _end(self) -> None:
        """End everything; the supervisor waits for something to read."""
        if self._supervisor.poll() is None:
            try:
                self._supervisor.communicate(b"end", CLOSE_S)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
        self._control.close()

    def _fork(self) -> Worker:
        self._wait_ready()
        ours, theirs = socket.socketpair()
        answer = b""
        try:
            with suppress(OSError), theirs:  # it has ended, or does not answer
                socket.send_fds(self._control, [FORK], [theirs.fileno()])
                answer = self._control.recv(PID_BYTES)
        except BaseException:  # see `kill`
            ours.close()
            self._end()
            raise
        pid = int.from_bytes(answer, "little", signed=True)
        if pid > 0:
            return Worker(pid, ours)
        ours.close()
        if pid < 0:
            raise ForkError(f"{self._what} cannot fork: {os.strerror(-pid)}", ended=False)
        raise ForkError(f"{self._what} has ended{self._tail()}", ended=True)

    def _wait_ready(self) -> None:
        if self._ready_by is None:
            return
        answer = b""
        try:
            self._control.settimeout(max(self._ready_by - time.monotonic(), 1e-3))
            answer = self._control.recv(MESSAGE_BYTES)
            self._control.settimeout(REQUEST_S)
        except TimeoutError:
            self._end()
            raise DeadlineError(self._owner, f"the imports of {self._what}", self._start_s) from None
        except OSError:  # closed by another thread
            pass
        if answer != READY:
            error = answer.decode(errors="replace") or "it has ended"
            raise RunError(f"{self._what} could not start: {error}{self._tail()}")
        self._ready_by = None

    def _tail(self) -> str:
        """The end of the log, for an error message."""
        return "" if self._log is None else f"; {log_tail(self._log)}"
