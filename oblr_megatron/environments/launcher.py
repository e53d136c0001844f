"""Starts environment processes (process.py): the trainer's handle of the one that forks, and of those it forked."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oblr_megatron.checks.run_dir import LOGS
from oblr_megatron.engine.channel import Channel, PeerGone
from oblr_megatron.environments.messages import Setup
from oblr_megatron.environments.process import PID_BYTES
from oblr_megatron.environments.watch import NOBODY, Watch
from oblr_megatron.errors import DeadlineError, RunError
from oblr_megatron.formatting import log_tail

if TYPE_CHECKING:
    from oblr_megatron.config import Config

logger = logging.getLogger(__name__)

FORK_SECONDS = 30.0
PAUSE_SECONDS = 1.0
"""Pause before the second attempt, after a fork that failed for lack of memory or processes."""


@dataclass(slots=True, eq=False)
class Process:
    """A process that runs episodes."""

    pid: int
    channel: Channel
    writer: Channel
    seen: tuple[int, float] = (NOBODY, 0.0)  # of the watch, at the host's last look
    ended: bool = False

    def end(self) -> None:
        """Kill it with all that it started; the thread that reads `channel` closes it."""
        self.ended = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.writer.close()


def tokenizer_class(model: str) -> type[Any]:
    """The class of a directory's tokenizer: `AutoTokenizer` finds it, but imports torch, which a rank has already."""
    from transformers import AutoTokenizer

    return type(AutoTokenizer.from_pretrained(model, trust_remote_code=False))


class _ForkError(RunError):
    """No process was forked."""

    def __init__(self, what: str, *, ended: bool) -> None:
        self.ended = ended  # the process that forks
        super().__init__(what)


class Launcher:
    """The process that has imported the user's function, and forks."""

    def __init__(self, config: Config, *, vocab_size: int, index: int, owner: str) -> None:
        """Start it and return; `fork` waits for its imports. Arguments as those of `host.EpisodeHost`."""
        self.watch = Watch()
        self._owner, self._start_s = owner, config.rollout.start_timeout_s
        model = str(config.model.path.absolute())
        options = dict(config.data.chat_template_options)
        tokenizer = tokenizer_class(model)
        self._setup = Setup(config.rollout.environment, tokenizer, model, vocab_size, tuple(sys.path), options)
        self._log = config.run_dir / LOGS / f"environment-{index}.log"
        # The kernel ends a child with the thread that started it; this thread lives as long as the launcher.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="environment")
        self._closed, self._lock = False, threading.Lock()  # nothing is started while, or after, it is closed
        self._started_at: float | None = None  # None once it is ready
        self._thread.submit(self._start).result()

    def fork(self) -> Process:
        """A new process, which waits for episodes. The one that forks is started once more if it has died.

        Raises:
            RunError: the function cannot be imported there, or a second attempt to fork failed.
            DeadlineError: the imports take longer than rollout.start_timeout_s.
        """
        try:
            return self._fork()
        except _ForkError as error:
            if self._closed:
                raise
            logger.warning("a process for episodes could not be started and is tried once more: %s", error)
            if error.ended:
                self._restart()
            else:
                time.sleep(PAUSE_SECONDS)
        return self._fork()

    def close(self) -> None:
        """End it. May be called more than once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._popen.kill()
            self._popen.wait()
            self._control.close()
            self._thread.shutdown()
            self.watch.close()

    def _fork(self) -> Process:
        with ExitStack() as failed:
            ours, theirs = map(failed.enter_context, socket.socketpair())
            seconds = self._start_s
            try:
                self._wait_ready()
                seconds = FORK_SECONDS
                self.watch.set(NOBODY)
                self._control.settimeout(FORK_SECONDS)
                with theirs:
                    socket.send_fds(self._control, [b"F"], [theirs.fileno()])
                answer = self._control.recv(PID_BYTES)
            except TimeoutError:
                raise DeadlineError(self._owner, "the environment process to start", seconds) from None
            except OSError:
                answer = b""
            if not answer:
                raise _ForkError(f"the environment process has ended; {log_tail(self._log)}", ended=True)
            pid = int.from_bytes(answer, "little", signed=True)
            if pid < 0:
                raise _ForkError(f"the environment process cannot fork: {os.strerror(-pid)}", ended=False)
            failed.pop_all()
        channel = Channel(ours)
        return Process(pid, channel, channel.writer())

    def _restart(self) -> None:
        """Start the process that forks again. The processes that it forked have ended with it.

        Raises:
            RunError: it cannot be started, or the launcher is closed.
        """
        with self._lock:
            if self._closed:
                raise RunError("the environment process has been ended")
            self._popen.kill()
            self._popen.wait()
            self._control.close()
            try:
                self._thread.submit(self._start).result()
            except OSError as error:
                raise RunError(f"the environment process cannot be started again: {error}") from error

    def _wait_ready(self) -> None:
        if self._started_at is None:
            return
        try:
            Channel(self._control).receive(self._started_at + self._start_s, alive=lambda: self._popen.poll() is None)
        except PeerGone:
            self._popen.wait()
            raise RunError(f"the environment process ended while it started; {log_tail(self._log)}") from None
        self._started_at = None

    def _start(self) -> None:
        own_end, child_end = socket.socketpair()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        module = "oblr_megatron.environments.process"
        command = [sys.executable, "-m", module, str(child_end.fileno()), str(self.watch.fd), str(os.getpid())]
        own = {
            "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",  # it forks
        }
        with child_end, self._log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(child_end.fileno(), self.watch.fd),
                start_new_session=True,  # Ctrl-C reaches the trainer alone
            )
        with suppress(PeerGone):  # it is dead already: `fork` reports it
            Channel(own_end).send(self._setup)
        self._control = own_end
        self._started_at = time.monotonic()
