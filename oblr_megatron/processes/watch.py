"""The job that runs at this moment, in memory that the trainer can read while the worker's process is blocked.

A function that never awaits stops the event loop of its process, and one that holds the interpreter lock stops every
thread. So a worker that runs many jobs in one loop writes down the number of a job before each step of one of its
tasks, and the trainer reads it. After the step it adds the step's seconds to those of the job and of all jobs, so that
a job is not charged for the steps of others. Imports no torch.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import time
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any

NOBODY = -1
_COUNT, _CELL, _SECONDS = struct.Struct("q"), struct.Struct("qdd"), struct.Struct("d")
JOBS = 2**16
"""Jobs at once; more would share their seconds."""
_SIZE = mmap.PAGESIZE + JOBS * _SECONDS.size
LOOKS = 1000  # at a value that is being written; a process that was killed meanwhile never ends to write it
JOB: ContextVar[int] = ContextVar("job", default=NOBODY)
"""Number of the job that a task belongs to."""


class Watch:
    """The number of the running job, since when it runs without an await, and the seconds of all steps so far."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd` of another process's watch; by default a new one, which a child process can inherit."""
        self.fd = os.memfd_create("oblr-watch") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _SIZE)
        self._cell = mmap.mmap(self.fd, _SIZE)
        if fd is None:
            self.set(NOBODY)

    def set(self, number: int) -> None:
        """Note that a job begins to run now; NOBODY: that none runs any more."""
        (count,) = _COUNT.unpack_from(self._cell, 0)
        before, since, seconds = _CELL.unpack_from(self._cell, _COUNT.size)
        _COUNT.pack_into(self._cell, 0, count | 1)  # odd: a reader of the other process waits
        now = time.monotonic()
        if before != NOBODY:
            seconds += now - since
            at = _place(before)
            _SECONDS.pack_into(self._cell, at, _SECONDS.unpack_from(self._cell, at)[0] + now - since)
        _CELL.pack_into(self._cell, _COUNT.size, number, now, seconds)
        _COUNT.pack_into(self._cell, 0, (count | 1) + 1)

    def get(self) -> tuple[int, float]:
        """(number of the running job or NOBODY, time.monotonic() of its beginning)."""
        number, since, _, _ = self._read()
        return number, since

    def seconds_of_others(self, number: int) -> float:
        """Seconds for which other jobs than this one ran, up to now. Only differences mean something."""
        now = time.monotonic()
        running, since, seconds, own = self._read(number)
        return seconds - own + (max(0.0, now - since) if running not in (NOBODY, number) else 0.0)

    def _read(self, number: int = 0) -> tuple[int, float, float, float]:
        """The running job, the beginning of its step, the seconds of all jobs, and those of this one."""
        for look in range(LOOKS):
            (count,) = _COUNT.unpack_from(self._cell, 0)
            running, since, seconds = _CELL.unpack_from(self._cell, _COUNT.size)
            (own,) = _SECONDS.unpack_from(self._cell, _place(number))
            if count % 2 == 0 and _COUNT.unpack_from(self._cell, 0) == (count,):
                break
            time.sleep(1e-5 if look > 10 else 0)
        return int(running), float(since), float(seconds), float(own)

    def close(self) -> None:
        """Give the memory back. May be called more than once."""
        if not self._cell.closed:
            self._cell.close()
            os.close(self.fd)


def _place(number: int) -> int:
    return mmap.PAGESIZE + number % JOBS * _SECONDS.size


class Watched(Coroutine[Any, Any, Any]):
    """A coroutine of a job that notes when it runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, watch: Watch) -> None:
        self._coroutine, self._number, self._watch = coroutine, number, watch

    def send(self, value: Any) -> Any:
        self._watch.set(self._number)
        try:
            return self._coroutine.send(value)
        finally:
            self._watch.set(NOBODY)

    def throw(self, *error: Any) -> Any:
        self._watch.set(self._number)
        try:
            return self._coroutine.throw(*error)
        finally:
            self._watch.set(NOBODY)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()


def watch_tasks(loop: asyncio.AbstractEventLoop, watch: Watch, tasks: dict[int, set[asyncio.Task[Any]]]) -> None:
    """Let every task of a job note when it runs, and collect the tasks by job."""

    def factory(own_loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        context = options.get("context")
        number = JOB.get() if context is None else context.get(JOB, NOBODY)
        if number == NOBODY:
            return asyncio.Task(coroutine, loop=own_loop, **options)
        task = asyncio.Task(Watched(coroutine, number, watch), loop=own_loop, **options)
        own = tasks.setdefault(number, set())
        own.add(task)
        task.add_done_callback(own.discard)
        return task

    loop.set_task_factory(factory)
