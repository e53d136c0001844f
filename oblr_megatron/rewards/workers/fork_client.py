"""The judging side's end of nursery.py: start it, ask it for workers, have it end them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection

from oblr_megatron.errors import DeadlineError, RunError
from oblr_megatron.rewards.workers.fork_server import FORK, KILL, PID_BYTES

START_S = 120.0  # deadline for the nursery's imports

_LAUNCH = "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given.pop('path'); \
from oblr_megatron.rewards.workers.fork_server import main; main(**given)"


@dataclass(slots=True)
class Worker:
    """A living worker process and the pipe to it."""

    pid: int
    pipe: Connection


class ForkServer:
    """A running nursery.

    Raises:
        RunError: the nursery cannot import what the workers need.
        DeadlineError: it takes longer than START_S.
    """

    def __init__(self, launch: dict[str, object]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = {**launch, "descriptor": theirs.fileno(), "parent": os.getpid(), "path": sys.path}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, json.dumps(given)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the trainer only, which then closes the pool
            )
        self._socket.settimeout(START_S)
        try:
            answer = self._socket.recv(8192)
        except TimeoutError as error:
            self.end()
            raise DeadlineError("the trainer", "the reward workers to import what they need", START_S) from error
        if answer != b"R":
            self.end()
            raise RunError(f"the reward workers could not start: {answer[1:].decode(errors='replace') or 'no message'}")

    def fork(self) -> Worker:
        """A new worker.

        Raises:
            OSError, EOFError: the nursery is gone.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [FORK + bytes(PID_BYTES)], [theirs.fileno()])
            answer = self._receive(PID_BYTES)
        return Worker(int.from_bytes(answer, "little"), Connection(ours.detach()))

    def kill(self, pid: int) -> None:
        """End a worker; when the nursery is gone, so are its workers."""
        try:
            self._socket.sendall(KILL + pid.to_bytes(PID_BYTES, "little"))
            self._receive(1)
        except (OSError, EOFError):
            return

    def end(self) -> None:
        """End the nursery, and with it all workers."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _receive(self, size: int) -> bytes:
        answer = self._socket.recv(size)
        if not answer:
            raise EOFError("the nursery is gone")
        return answer
