"""Judging in worker processes that can be stopped: a hard deadline for every call, whatever the worker is doing.

    pool = Pool("oblr_megatron.rewards.verifier.symbolic:score", num_workers=2, deadline_s=10.0)
    pool.ask("1/2", "0.5")            # Outcome(value=1.0)
    pool.map([("1", "1"), ("2", "1")])
    pool.map(rows, together=64)       # for a function that judges many at once

Thread-based limits cannot stop a computation that holds the interpreter lock, and SIGALRM works in the main thread
only; so each worker has a pipe of its own, the caller waits on it up to the deadline and then has the worker killed. A
worker past its deadline, its memory limit or its number of tasks is replaced by a fork of the nursery (nursery.py),
which takes milliseconds. Workers are lent to callers in the order they asked: a caller with one question waits for one
turn, not for another caller's whole batch. No port, no environment variable: a pool works inside a torchrun rank, in
any thread, and in a forked child of the process that made it.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType

from oblr_megatron.errors import RunError
from oblr_megatron.rewards.workers.calls import Reply
from oblr_megatron.rewards.workers.fork_client import ForkServer, Worker

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Outcome:
    """One verdict. Exactly one of `value`, `error` and `timed_out` is set.

    Examples: Outcome(value=1.0); Outcome(error="Traceback ..."); Outcome(timed_out=True).
    """

    value: float | None = None
    error: str = ""
    timed_out: bool = False


@dataclass(slots=True)
class _Seat:
    """A place for one worker; empty until it is needed, and after its worker was killed."""

    worker: Worker | None = None


class Pool:
    """Worker processes that call one function, named "package.module:function", of a kind that calls.py knows."""

    _owner: int  # process id: a fork of it starts afresh
    _closed: bool
    _lock: threading.Lock  # guards the seats and the queue
    _fork_server_lock: threading.Lock  # one request to the nursery at a time
    _fork_server: ForkServer | None
    _free: list[_Seat]
    _waiting: deque[SimpleQueue[_Seat | None]]

    def __init__(
        self,
        target: str,
        *,
        num_workers: int,
        deadline_s: float,
        grace_s: float = 0.0,
        prepare: str = "",
        memory_bytes: int = 2 * GIB,
        tasks_per_worker: int = 2000,
    ) -> None:
        """Nothing is started before the first question.

        Args:
            target: the function.
            num_workers: processes that judge at once.
            deadline_s: seconds for one call, from when a worker is free.
            grace_s: beyond which the worker is killed; what it awaits it gives up itself at the deadline.
            prepare: a function called once in the nursery, e.g. to fill caches.
            memory_bytes: what one worker may allocate.
            tasks_per_worker: a worker is replaced after so many calls.
        """
        self.limit_s = deadline_s + grace_s
        self._launch: dict[str, object] = {
            "target": target, "prepare": prepare, "deadline_s": deadline_s, "memory_bytes": memory_bytes,
            "tasks_per_worker": tasks_per_worker,
        }  # fmt: skip
        self.num_workers = num_workers
        self._reset()

    def ask(self, *arguments: str) -> Outcome:
        """Judge one; from any thread. Waits for a free worker, then at most the deadline.

        Raises:
            RunError: the pool is closed, or workers cannot be started.
        """
        return self._ask([arguments])[0]

    def map(self, batch: Sequence[Sequence[str]], together: int = 1) -> list[Outcome]:
        """Judge all, in parallel; outcomes in the order of the batch.

        Args:
            batch: arguments of each.
            together: so many are one call, with one deadline.

        Raises:
            RunError: as `ask`.
        """
        self._own()
        calls = [batch[first : first + together] for first in range(0, len(batch), together)]
        outcomes: list[list[Outcome]] = [[] for _ in calls]
        errors: list[BaseException] = []
        remaining = iter(range(len(calls)))  # next() on an iterator is atomic

        def dispatch() -> None:
            try:
                for index in remaining:
                    outcomes[index] = self._ask(calls[index])
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                errors.append(error)

        threads = [threading.Thread(target=dispatch, daemon=True) for _ in range(min(self.num_workers, len(calls)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [outcome for call in outcomes for outcome in call]

    def close(self) -> None:
        """End all workers; calls in progress fail. May be called twice."""
        self._own()
        with self._lock:
            self._closed = True
            while self._waiting:
                self._waiting.popleft().put(None)
            for seat in self._free:
                if seat.worker is not None:
                    seat.worker.pipe.close()
            if self._fork_server is not None:
                self._fork_server.end()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _own(self) -> None:
        """A forked child shares its parent's pipes: it leaves them alone and starts workers of its own."""
        if os.getpid() != self._owner:
            self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._fork_server_lock = threading.Lock()
        self._fork_server = None
        self._free = [_Seat() for _ in range(self.num_workers)]
        self._waiting = deque()

    def _borrow(self) -> _Seat:
        """A seat, in turn: one that becomes free goes straight to the caller that waited longest."""
        with self._lock:
            if self._closed:
                raise RunError("the reward workers were already closed")
            if self._free:
                return self._free.pop()
            ticket: SimpleQueue[_Seat | None] = SimpleQueue()
            self._waiting.append(ticket)
        seat = ticket.get()
        if seat is None:
            raise RunError("the reward workers were closed while a call was waiting")
        return seat

    def _give_back(self, seat: _Seat) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().put(seat)
            else:
                self._free.append(seat)

    def _ask(self, rows: Sequence[Sequence[str]]) -> list[Outcome]:
        """One call; the outcomes of its rows."""
        self._own()
        seat = self._borrow()
        try:
            return self._score_batch(seat, rows)
        finally:
            self._give_back(seat)

    def _score_batch(self, seat: _Seat, rows: Sequence[Sequence[str]]) -> list[Outcome]:
        try:
            worker = self._send(seat, json.dumps([list(row) for row in rows]).encode())
            if not worker.pipe.poll(self.limit_s):
                self._dismiss(seat)
                return [Outcome(timed_out=True)] * len(rows)
            reply: Reply = json.loads(worker.pipe.recv_bytes())
        except (OSError, EOFError):
            self._dismiss(seat)
            return [Outcome(error="the worker process died while judging")] * len(rows)
        if reply["leaving"]:
            self._dismiss(seat)
        return [Outcome(verdict["value"], verdict["error"], verdict["late"]) for verdict in reply["verdicts"]]

    def _send(self, seat: _Seat, message: bytes) -> Worker:
        """Hand a message to the seat's worker; one that died while it was idle is replaced, once."""
        try:
            worker = seat.worker or self._hire(seat)
            worker.pipe.send_bytes(message)
        except OSError:
            self._dismiss(seat)
            worker = self._hire(seat)
            worker.pipe.send_bytes(message)
        return worker

    def _hire(self, seat: _Seat) -> Worker:
        """Fork a worker, starting the nursery first where there is none or it died."""
        with self._fork_server_lock:
            if self._closed:
                raise RunError("the reward workers were already closed")
            try:
                self._fork_server = self._fork_server or ForkServer(self._launch)
                seat.worker = self._fork_server.fork()
            except (OSError, EOFError):
                if self._fork_server is not None:
                    self._fork_server.end()
                self._fork_server = ForkServer(self._launch)
                seat.worker = self._fork_server.fork()
        return seat.worker

    def _dismiss(self, seat: _Seat) -> None:
        worker, seat.worker = seat.worker, None
        if worker is None:
            return
        worker.pipe.close()
        with self._fork_server_lock:
            if self._fork_server is not None and not self._closed:
                self._fork_server.kill(worker.pid)
