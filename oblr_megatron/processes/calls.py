"""In a worker process: call the reward function on the rows of a request. Four kinds of functions are supported.

    def score(response, answer, prompt) -> float                    one row per request
    async def score(response, answer, prompt) -> float              all rows concurrently; each has its own timeout
    def score(responses, answers, prompts) -> list[float]           all rows in one call
    async def score(responses, answers, prompts) -> list[float]     the same, awaited

Arguments go by name, in any order: a function gets those of `SINGLE` or `BATCH` that its signature names. Names in the
plural make a batch function. `row` (`rows`) is the data row's columns as a dict. A function without such names, which
the package itself has, gets a row's values by position. Awaitable return values are awaited, so that a plain function
may wrap an async one.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import inspect
import json
import math
import numbers
import os
import resource
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from multiprocessing.connection import Connection
from typing import Any

from oblr_megatron.processes.children import end_children
from oblr_megatron.processes.fork_server import Serve
from oblr_megatron.user_functions import resolve

MEMORY_BYTES = 2 * 2**30
M_ARENA_MAX = -8  # of malloc.h
"""Allocation limit of a worker, in addition to the memory of the imports."""
MEMORY_LIMIT = (
    f"the worker's memory limit was reached, {MEMORY_BYTES >> 30} GiB beyond the imports at the top of the module; "
    "import large libraries there, not in the function"
)
SINGLE = ("response", "answer", "prompt", "row")
BATCH = ("responses", "answers", "prompts", "rows")
ROWS = (SINGLE[-1], BATCH[-1])


@dataclass(frozen=True, slots=True)
class Score:
    """Result for one row; exactly one field is set. Example: Score(value=1.0)."""

    value: float | None = None
    error: str = ""  # traceback or message
    timed_out: bool = False
    text: str | None = None  # result of a function that returns text (`returns_text`)


@dataclass(slots=True)
class WorkerReply:
    """Answer of a worker, sent as JSON. Example: WorkerReply(scores=[Score(value=1.0)])."""

    scores: list[Score]  # in the order of the rows
    leaving: bool = False  # the worker exits after this reply


@dataclass(frozen=True, slots=True)
class FunctionKind:
    """Kind of a function. Example: FunctionKind(batch=True, awaited=True, parameters=("responses", "answers"))."""

    batch: bool
    awaited: bool
    parameters: tuple[str, ...] = ()  # those of SINGLE or BATCH that it takes, in its order; none: called by position

    @property
    def takes_row(self) -> bool:
        """Whether it takes the columns of the data row."""
        return not set(ROWS).isdisjoint(self.parameters)

    @property
    def takes_many(self) -> bool:
        """Whether a request should contain many rows."""
        return self.batch or self.awaited


def kind_of(function: Callable[..., object]) -> FunctionKind:
    """The kind of a function, from its signature. `**kwargs` gets response, answer and prompt, but not the row."""
    call = getattr(function, "__call__", None)  # noqa: B004  for a callable object, only this method is async
    parameters = parameters_of(function)
    names = [parameter.name for parameter in parameters]
    batch = not set(BATCH).isdisjoint(names)
    known = BATCH if batch else SINGLE
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names += [name for name in known[:-1] if name not in names]
    return FunctionKind(
        batch=batch,
        awaited=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call),
        parameters=tuple(name for name in names if name in known),
    )


def parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters in order; none for a builtin without a signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return []


class LateError(Exception):
    """An awaited call exceeded the deadline."""


def answers(
    target: str, prepare: str, imports: Sequence[str], *, deadline_s: float, returns_text: bool, tasks_per_worker: int
) -> Serve:
    """The work of a pool's worker; called in the fork server, with arguments as those of `Pool`."""
    caller = Caller(resolve(target), deadline_s, returns_text=returns_text)
    for name in imports:
        resolve(name)
    if prepare:
        resolve(prepare)()
    return lambda end: _serve(Connection(end.detach()), caller, tasks_per_worker)


def _serve(pipe: Connection, caller: Caller, tasks: int) -> None:
    """Answer requests: rows as JSON. Whatever the function starts ends before the answer, a `WorkerReply` as JSON."""
    _limit_memory()
    worker = os.getpid()
    for count in range(1, tasks + 1):
        try:
            rows = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        reply = caller.answer(rows)
        if os.getpid() != worker:
            return  # a fork that the function forgot to end
        all_ended = end_children()
        reply.leaving |= count == tasks or not all_ended
        pipe.send_bytes(json.dumps(asdict(reply)).encode())
        if reply.leaving:
            return


def _limit_memory() -> None:
    """Limit the address space to its current size plus MEMORY_BYTES; disable core dumps.

    glibc reserves 64 MiB of address space for the arena of a new thread, with 8 arenas to a core. Two are enough here,
    so that a function with 64 threads fits on any machine.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # musl has no arenas
        libc.mallopt(M_ARENA_MAX, 2)
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Caller:
    """Answers requests with one function. Keeps one event loop for the lifetime of the worker.

    Args:
        function: takes strings, or lists of strings, and the data row or rows.
        deadline_s: for awaited calls; for other calls the parent enforces the deadline by killing the worker.
        returns_text: whether the function returns text instead of a number.
    """

    def __init__(self, function: Callable[..., object], deadline_s: float, *, returns_text: bool) -> None:
        self._function, self._kind, self._deadline_s = function, kind_of(function), deadline_s
        self._score_of = (lambda value: Score(text=str(value))) if returns_text else score_of
        self._runner = asyncio.Runner()

    def answer(self, rows: Sequence[Sequence[str]]) -> WorkerReply:
        """Score all rows, each the arguments of a call in the order of `FunctionKind.parameters`. Raises nothing."""
        try:
            calls = [self._arguments(row) for row in rows]
            if self._kind.batch:
                columns = [list(column) for column in zip(*calls, strict=True)]
                return WorkerReply(_batch_scores(self._result(self._call(columns)), len(rows)))
            if self._kind.awaited:
                return self._runner.run(self._concurrently(calls))
            return WorkerReply([self._score_of(self._result(self._call(call))) for call in calls])
        except BaseException as error:  # noqa: BLE001  a reward function may raise anything, SystemExit included
            return _failure(error, len(rows))

    def _arguments(self, row: Sequence[str]) -> list[Any]:
        """The values of a row; the data row is JSON."""
        names = self._kind.parameters or [""] * len(row)
        return [json.loads(value) if name in ROWS else value for name, value in zip(names, row, strict=True)]

    def _call(self, values: Sequence[Any]) -> object:
        names = self._kind.parameters
        return self._function(**dict(zip(names, values, strict=True))) if names else self._function(*values)

    def _result(self, value: object) -> object:
        """The function's value, awaited if it is awaitable; LateError if that exceeds the deadline."""
        return self._runner.run(self._bounded(value)) if inspect.isawaitable(value) else value

    async def _bounded(self, value: Awaitable[object]) -> object:
        task = asyncio.ensure_future(value)
        done, _ = await asyncio.wait([task], timeout=self._deadline_s)
        if not done:
            raise LateError
        return task.result()

    async def _concurrently(self, calls: Sequence[Sequence[Any]]) -> WorkerReply:
        """Run all calls at once. Late calls stay in the event loop, so the worker must exit."""
        tasks = [asyncio.ensure_future(self._attempt(call)) for call in calls]
        done, _ = await asyncio.wait(tasks, timeout=self._deadline_s)
        replies = [task.result() if task in done else _failure(LateError()) for task in tasks]
        return WorkerReply(
            [score for reply in replies for score in reply.scores], any(reply.leaving for reply in replies)
        )

    async def _attempt(self, arguments: Sequence[Any]) -> WorkerReply:
        try:
            value = self._call(arguments)
            return WorkerReply([self._score_of(await value if inspect.isawaitable(value) else value)])
        except BaseException as error:  # noqa: BLE001  as in `answer`; the other calls must go on
            return _failure(error)


LARGEST_REWARD = 1e9
"""In magnitude. Larger ones, such as a float's maximum for "failed", would make a group's gradient overflow."""


def score_of(value: object) -> Score:
    """The score for a reward: a Python number, or a scalar of numpy or torch. An error unless it has a usable size."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        number = float(plain) if isinstance(plain, (numbers.Real, Decimal)) else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array; an integer larger than any float
        number = math.nan
    if not math.isfinite(number):
        return Score(error=f"the reward {value!r:.200} is not a finite number")
    if abs(number) > LARGEST_REWARD:
        return Score(error=f"the reward {value!r:.200} is beyond {LARGEST_REWARD:g}")
    return Score(number)


def _batch_scores(value: object, count: int) -> list[Score]:
    """The scores in a batch function's value.

    Raises:
        TypeError, ValueError: it is not a list of `count` values.
    """
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, (str, bytes, Mapping)) or not hasattr(plain, "__iter__"):
        raise TypeError(f"a batch reward must return a list of numbers, but returned {value!r:.200}")
    values = list(plain)
    if len(values) != count:
        raise ValueError(f"the batch reward returned {len(values)} values for {count} responses")
    return [score_of(one) for one in values]


def _failure(error: BaseException, count: int = 1) -> WorkerReply:
    """The same error for `count` rows. The worker leaves if its state may be damaged."""
    if isinstance(error, LateError):
        score = Score(timed_out=True)
    elif _is_memory_limit(error):
        score = Score(error=f"{error}: {MEMORY_LIMIT}" if str(error) else MEMORY_LIMIT)
    else:
        score = Score(error="".join(traceback.format_exception(error))[-4000:])
    leaving = isinstance(error, LateError) or _is_memory_limit(error) or not isinstance(error, Exception)
    return WorkerReply([score] * count, leaving)


def _is_memory_limit(error: BaseException) -> bool:
    """Whether memory was missing: for an object, a thread, a system call, or a library that the function imports."""
    no_library = isinstance(error, ImportError) and any(
        words in str(error) for words in ("failed to map segment", "cannot allocate memory")
    )
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    return no_library or no_thread or isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
