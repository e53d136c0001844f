"""Client of the fork server (fork_server.py): start it with its supervisor, fork workers, kill workers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection

from oblr_megatron.errors import DeadlineError, RunError
from oblr_megatron.processes.children import END_S
from oblr_megatron.processes.fork_server import FORK, KILL, PID_BYTES

START_S = 120.0  # deadline for the fork server's imports
CLOSE_S = END_S + 5.0  # deadline for the supervisor, which needs END_S at most

_LAUNCH = "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given.pop('path'); \
from oblr_megatron.processes.fork_server import main; main(**given)"


@dataclass(slots=True)
class Worker:
    """A live worker process and the pipe to it."""

    pid: int
    pipe: Connection


class ForkServer:
    """A running fork server.

    Raises:
        RunError: it cannot import the workers' function.
        DeadlineError: the imports take longer than START_S.
    """

    def __init__(self, launch: dict[str, object]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = {**launch, "descriptor": theirs.fileno(), "parent": os.getpid(), "path": sys.path}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        with theirs:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, json.dumps(given)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C then reaches only the trainer, which closes the pool
            )
        self._socket.settimeout(START_S)
        try:
            answer = self._socket.recv(8192)
        except TimeoutError as error:
            self.end()
            raise DeadlineError("the trainer", "the imports of the reward workers", START_S) from error
        if answer != b"R":
            self.end()
            raise RunError(f"the reward workers could not start: {answer[1:].decode(errors='replace') or 'no message'}")

    def fork(self) -> Worker:
        """Start a worker.

        Raises:
            OSError, EOFError: the fork server has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [FORK + bytes(PID_BYTES)], [theirs.fileno()])
            answer = self._receive(PID_BYTES)
        return Worker(int.from_bytes(answer, "little"), Connection(ours.detach()))

    def kill(self, pid: int) -> None:
        """Kill a worker and everything it started. If the fork server has ended, so have its workers."""
        try:
            self._socket.sendall(KILL + pid.to_bytes(PID_BYTES, "little"))
            self._receive(1)
        except (OSError, EOFError):
            return

    def end(self) -> None:
        """End the fork server, all its workers and everything they started."""
        self._socket.close()
        if self._supervisor.poll() is not None:
            return
        try:
            self._supervisor.communicate(b"end", CLOSE_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()

    def _receive(self, size: int) -> bytes:
        answer = self._socket.recv(size)
        if not answer:
            raise EOFError("the fork server has ended")
        return answer
