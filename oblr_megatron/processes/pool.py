"""A pool of worker processes with a hard deadline for every call.

    pool = Pool("oblr_megatron.rewards.verifier.symbolic:score", num_workers=2, deadline_s=10.0)
    pool.ask("1/2", "0.5")            # Score(value=1.0)
    pool.map([("1", "1"), ("2", "1")])
    pool.map(rows, together=64)       # for a function that takes many rows

Threads cannot stop a computation that holds the interpreter lock, and SIGALRM works only in the main thread. So the
caller waits on the worker's pipe until the deadline, then kills the worker. The fork server (fork_server.py) replaces a
worker within milliseconds if it exceeds its deadline, memory limit or number of tasks, and ends what the worker has
started. Workers serve calls in their order: a single call does not wait for another caller's whole batch. A pool uses
neither ports nor environment variables. It works in a torchrun rank, in any thread, and in a forked child of its
process.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import LifoQueue, SimpleQueue

from oblr_megatron.errors import RunError
from oblr_megatron.processes.calls import Score
from oblr_megatron.processes.client import ForkError, ForkServer, Worker
from oblr_megatron.processes.patience import Patience

START_S = 120.0
"""Deadline for the fork server's imports."""


@dataclass(slots=True)
class _Place:
    """Room for one worker, with the pipe to it."""

    own: tuple[Worker, Connection] | None = None


class Pool:
    """Worker processes that call the function "package.module:function", of one of the kinds in calls.py."""

    def __init__(
        self,
        target: str,
        *,
        num_workers: int,
        deadline_s: float,
        grace_s: float = 0.0,
        prepare: str = "",
        imports: Sequence[str] = (),
        returns_text: bool = False,
        tasks_per_worker: int = 2000,
    ) -> None:
        """Processes start with the first call.

        Args:
            target: the function, "package.module:function".
            num_workers: worker processes.
            deadline_s: seconds for one call, without the wait for a free worker.
            grace_s: additional seconds before the worker is killed; async calls time out in the worker at deadline_s.
            prepare: a function called once in the fork server, e.g. to fill caches.
            imports: further functions to import in the fork server; an import in a worker counts as its memory.
            returns_text: whether the function returns text, not a number; then `Score.text` has it.
            tasks_per_worker: a worker is replaced after this many calls.
        """
        self.limit_s = deadline_s + grace_s
        self._what = f"the workers for {target}"
        self._options: dict[str, object] = {
            "target": target, "prepare": prepare, "deadline_s": deadline_s, "imports": list(imports),
            "returns_text": returns_text, "tasks_per_worker": tasks_per_worker,
        }  # fmt: skip
        self.num_workers = num_workers
        self._reset()

    def ask(self, *arguments: str) -> Score:
        """Call the function on one row, from any thread. Waits for a free worker, then at most until the deadline.

        Raises:
            RunError: the pool is closed, or workers cannot be started.
        """
        self._own()
        return self._call([arguments])[0]  # without a thread: a process that forks should have none

    def map(self, batch: Sequence[Sequence[str]], together: int = 1) -> list[Score]:
        """Call the function on all rows in parallel; scores are in the order of the batch. See also `Patience`.

        Args:
            batch: rows, each the arguments of the function.
            together: rows per call; each call has one deadline.

        Raises:
            RunError: see `ask`.
        """
        self._own()
        calls = [batch[first : first + together] for first in range(0, len(batch), together)]
        scores = [[Score(timed_out=True)] * len(call) for call in calls]
        running: dict[Future[list[Score]], int] = {}
        done: SimpleQueue[Future[list[Score]]] = SimpleQueue()

        def collect() -> None:
            future = done.get()
            place = running.pop(future)
            scores[place] = self._scores(future)
            self._patience.note(scores[place])

        for place in self._patience.begin(len(calls)):
            future = self.submit(calls[place])
            running[future] = place
            future.add_done_callback(done.put)
            if len(running) == self.num_workers:
                collect()
        while running:
            collect()
        return [score for call in scores for score in call]

    def submit(self, rows: Sequence[Sequence[str]], begun: Callable[[], object] = lambda: None) -> Future[list[Score]]:
        """Begin one call with these rows, once the calls before it have workers; then call `begun` in a thread.

        Raises:
            RunError: the pool is closed.
        """
        self._own()
        try:
            return self._threads.submit(self._call, rows, begun)
        except RuntimeError:
            raise RunError(f"{self._what} are closed") from None

    def close(self) -> None:
        """End all workers; running calls fail. May be called twice."""
        self._own()
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._server is not None:
            self._server.close()

    def _own(self) -> None:
        """In a forked child, start new workers: the inherited pipes belong to the parent."""
        if os.getpid() != self._owner:
            self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._closed = False
        self._lock: threading.Lock = threading.Lock()  # no fork server is started after the pool is closed
        self._server: ForkServer | None = None
        self._patience = Patience(self.num_workers)
        self._threads: ThreadPoolExecutor = ThreadPoolExecutor(self.num_workers, thread_name_prefix="pool")
        self._idle: LifoQueue[_Place] = LifoQueue()  # the last used first, so that few workers start
        for _ in range(self.num_workers):
            self._idle.put(_Place())

    def _scores(self, call: Future[list[Score]]) -> list[Score]:
        try:
            return call.result()
        except CancelledError:
            raise RunError(f"{self._what} were closed while a call was waiting") from None

    def _call(self, rows: Sequence[Sequence[str]], begun: Callable[[], object] = lambda: None) -> list[Score]:
        """The scores of the rows, by the next idle worker."""
        place = self._idle.get()
        try:
            pipe = self._send(place, json.dumps([list(row) for row in rows]).encode())
            begun()
            if not pipe.poll(self.limit_s):
                self._end_worker(place)
                return [Score(timed_out=True)] * len(rows)
            reply = json.loads(pipe.recv_bytes())  # a `WorkerReply`
            if reply["leaving"]:
                self._end_worker(place)
            return [Score(**score) for score in reply["scores"]]
        except ForkError as error:
            return [Score(error=str(error))] * len(rows)
        except (OSError, EOFError):
            self._end_worker(place)
            return [Score(error="the worker process died during the call")] * len(rows)
        except BaseException:  # such as Ctrl-C: the next call would read this one's reply
            self._end_worker(place)
            raise
        finally:
            self._idle.put(place)

    def _send(self, place: _Place, message: bytes) -> Connection:
        """Send a message to the place's worker, and return its pipe.

        A worker that died while idle, or does not read, is replaced once. The latter may have a thread that a call left
        behind, and that holds the interpreter lock.
        """
        try:
            pipe = self._pipe(place)
            pipe.send_bytes(message)
        except OSError:
            self._end_worker(place)
            pipe = self._pipe(place)
            pipe.send_bytes(message)
        return pipe

    def _pipe(self, place: _Place) -> Connection:
        """The pipe to the place's worker, which is started if there is none."""
        if place.own is None:
            with self._lock:
                if self._closed:
                    raise RunError(f"{self._what} are closed")
                target = "oblr_megatron.processes.calls:answers"
                self._server = self._server or ForkServer(
                    target, self._options, what=self._what, owner="the trainer", start_s=START_S
                )
            worker = self._server.fork()
            half = divmod(max(1, round(self.limit_s / 2 * 1e6)), 1_000_000)  # two writes wait: one sends a part
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a reply may stop in its middle
                worker.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *half))  # a timeval
            place.own = worker, Connection(worker.socket.detach())
        return place.own[1]

    def _end_worker(self, place: _Place) -> None:
        if place.own is not None and self._server is not None:
            (worker, pipe), place.own = place.own, None
            pipe.close()
            self._server.kill(worker)
