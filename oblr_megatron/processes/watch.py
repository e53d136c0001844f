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
import time
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any

NOBODY = -1
JOBS = 2**16
"""Jobs at once; more would share their seconds."""
_COUNT, _RUNNING, _SINCE, _ALL, _OWN = range(5)
"""Places of 8 bytes each. One store writes a place, so that no reader meets half of a value."""
_SIZE = 8 * (_OWN + JOBS)
LOOKS = 1000  # at values that are being written; a process that was killed meanwhile never ends to write them
JOB: ContextVar[int] = ContextVar("job", default=NOBODY)
"""Number of the job that a task belongs to."""


class Watch:
    """The number of the running job, since when it runs without an await, and the seconds of all steps so far."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd` of another process's watch; by default a new one, which a child process can inherit."""
        self.fd = os.memfd_create("oblr-watch") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _SIZE)
        self._memory = mmap.mmap(self.fd, _SIZE)
        # struct would clear a place before it writes there; an item of a memoryview is stored at once.
        self._numbers = memoryview(self._memory).cast("q")
        self._seconds = memoryview(self._memory).cast("d")
        if fd is None:
            self.set(NOBODY)

    def set(self, number: int) -> None:
        """Note that a job begins to run now; NOBODY: that none runs any more."""
        numbers, seconds = self._numbers, self._seconds
        numbers[_COUNT] |= 1  # odd: a reader of the other process waits
        now = time.monotonic()
        before, since = numbers[_RUNNING], seconds[_SINCE]
        numbers[_RUNNING] = NOBODY  # a reader that gives up waiting never takes the old `since` for the new job's
        if before != NOBODY:
            seconds[_ALL] += now - since
            seconds[_place(before)] += now - since
        seconds[_SINCE] = now
        numbers[_RUNNING] = number
        numbers[_COUNT] += 1

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
        """The running job, the beginning of its step, the seconds of all jobs, and those of this one.

        After LOOKS at a write that does not end, the values may lack a step or a part of it, and nothing else.
        """
        for look in range(LOOKS):
            count = self._numbers[_COUNT]
            running, since = self._numbers[_RUNNING], self._seconds[_SINCE]
            seconds, own = self._seconds[_ALL], self._seconds[_place(number)]
            if count % 2 == 0 and self._numbers[_COUNT] == count:
                break
            time.sleep(1e-5 if look > 10 else 0)
        return running, since, seconds, own

    def close(self) -> None:
        """Give the memory back. May be called more than once."""
        if not self._memory.closed:
            self._numbers.release()
            self._seconds.release()
            self._memory.close()
            os.close(self.fd)


def _place(number: int) -> int:
    return _OWN + number % JOBS


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # cr_running, cr_frame, ...: anyio reads them when it cancels


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
