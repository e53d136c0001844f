"""What a judging worker does with a request: it calls the reward function on the rows, whatever kind of function it is.

    def score(response, answer, prompt) -> float                    a row a request
    async def score(response, answer, prompt) -> float              all rows of a request at once, each late alone
    def score(responses, answers, prompts) -> list[float]           all rows of a request in one call
    async def score(responses, answers, prompts) -> list[float]     the same, awaited

A batch function is known by its parameters' names. Whatever is returned is awaited if it can be, so that a function
that only wraps an async one works, too.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

SINGLE = ("response", "answer", "prompt")
BATCH = ("responses", "answers", "prompts")


class Verdict(TypedDict):
    """Of one row. Example: {"value": 1.0, "error": "", "late": False}."""

    value: float | None  # None: the function failed, or ran late
    error: str  # its traceback
    late: bool


class Reply(TypedDict):
    """What a worker answers. Example: {"verdicts": [Verdict(...)], "leaving": False}."""

    verdicts: list[Verdict]  # in the order of the rows
    leaving: bool  # the worker ends after this reply


@dataclass(frozen=True, slots=True)
class Kind:
    """How a function is called. Example of an async batch function: Kind(batch=True, awaited=True)."""

    batch: bool
    awaited: bool

    @property
    def takes_many(self) -> bool:
        """Whether a request should hold many rows."""
        return self.batch or self.awaited


def kind_of(function: Callable[..., object]) -> Kind:
    """The kind that a function's signature shows; a builtin without a signature takes one row."""
    call = getattr(function, "__call__", None)  # noqa: B004  of an object: what is async is its method
    return Kind(
        batch=not set(BATCH).isdisjoint(parameter_names(function)),
        awaited=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call),
    )


def parameter_names(function: Callable[..., object]) -> list[str]:
    """Names in order; empty for a builtin without a signature."""
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        return []


class LateError(Exception):
    """An awaited call was not over at the deadline."""


class Caller:
    """Answers requests with one function; its event loop is the worker's as long as the worker lives.

    Args:
        function: of strings, or of lists of strings.
        deadline_s: for what is awaited; what is not is ended by the parent, with the worker.
    """

    def __init__(self, function: Callable[..., object], deadline_s: float) -> None:
        self._function, self._kind, self._deadline_s = function, kind_of(function), deadline_s
        self._runner = asyncio.Runner()

    def answer(self, rows: Sequence[Sequence[str]]) -> Reply:
        """The verdicts of all rows; raises nothing, whatever the function does."""
        try:
            if self._kind.batch:
                columns = [list(column) for column in zip(*rows, strict=True)]
                return _reply(_listed(self._result(self._function(*columns)), len(rows)))
            if self._kind.awaited:
                return self._runner.run(self._together(rows))
            return _reply([_verdict(self._result(self._function(*row))) for row in rows])
        except BaseException as error:  # noqa: BLE001  a reward function may raise anything, SystemExit included
            return Reply(verdicts=[_failed(error)] * len(rows), leaving=_spoils(error))

    def _result(self, value: object) -> object:
        """What a function returned, awaited if it has to be.

        Raises:
            LateError: it was not there at the deadline.
        """
        return self._runner.run(self._bounded(value)) if inspect.isawaitable(value) else value

    async def _bounded(self, value: Awaitable[object]) -> object:
        task = asyncio.ensure_future(value)
        done, _ = await asyncio.wait([task], timeout=self._deadline_s)
        if not done:
            raise LateError
        return task.result()

    async def _together(self, rows: Sequence[Sequence[str]]) -> Reply:
        """All calls at once. Those that are late are left behind in the loop, which ends with the worker."""
        tasks = [asyncio.ensure_future(self._attempt(row)) for row in rows]
        done, _ = await asyncio.wait(tasks, timeout=self._deadline_s)
        replies = [task.result() if task in done else _late() for task in tasks]
        return Reply(
            verdicts=[verdict for reply in replies for verdict in reply["verdicts"]],
            leaving=any(reply["leaving"] for reply in replies),
        )

    async def _attempt(self, row: Sequence[str]) -> Reply:
        try:
            value = self._function(*row)
            return _reply([_verdict(await value if inspect.isawaitable(value) else value)])
        except BaseException as error:  # noqa: BLE001  as above; and the other calls go on
            return Reply(verdicts=[_failed(error)], leaving=_spoils(error))


def finite(value: object) -> float | None:
    """A plain float of a Python number or of a scalar of numpy or torch; None of anything else."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        number = float(plain) if isinstance(plain, numbers.Real) else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of several; an integer beyond all floats
        return None
    return number if math.isfinite(number) else None


def _verdict(value: object) -> Verdict:
    number = finite(value)
    error = f"the reward {value!r:.200} is not a finite number" if number is None else ""
    return Verdict(value=number, error=error, late=False)


def _listed(value: object, count: int) -> list[Verdict]:
    """The verdicts of a batch function's value.

    Raises:
        TypeError, ValueError: it is no list of `count` values.
    """
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, (str, bytes, Mapping)) or not hasattr(plain, "__iter__"):
        raise TypeError(f"a batch reward returns a list of numbers, and this one returned {value!r:.200}")
    values = list(plain)
    if len(values) != count:
        raise ValueError(f"the batch reward returned {len(values)} values for {count} responses")
    return [_verdict(one) for one in values]


def _reply(verdicts: list[Verdict]) -> Reply:
    return Reply(verdicts=verdicts, leaving=False)


def _late() -> Reply:
    return Reply(verdicts=[Verdict(value=None, error="", late=True)], leaving=True)


def _failed(error: BaseException) -> Verdict:
    if isinstance(error, LateError):
        return Verdict(value=None, error="", late=True)
    if isinstance(error, MemoryError):
        return Verdict(value=None, error="the worker's memory limit was reached", late=False)
    return Verdict(value=None, error="".join(traceback.format_exception(error))[-4000:], late=False)


def _spoils(error: BaseException) -> bool:
    """Whether the worker should make room for a new one."""
    return isinstance(error, (LateError, MemoryError)) or not isinstance(error, Exception)
