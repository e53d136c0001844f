"""All-gather each rank's outcome (value or error) with a timeout, so that every rank takes the same branch.

collectives = Collectives(rank=parallel.rank)                        # on every rank
own = attempt(lambda: engine.generate(...))                          # a rank without an engine has nothing to do
outcomes = collectives.gather(own, what="64 prompts", seconds=60)    # by rank; waits at most 60 s
raise_first(outcomes, own)                                           # the same error on every rank, or none
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.errors import (
    DamagedError,
    DeadlineError,
    EngineLostError,
    EnginesGoneError,
    RunError,
    UnwrittenError,
    UserError,
)

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

SHORT = 2**16  # bytes; values up to this length are always padded
SILENT_S = 60.0  # a longer wait is announced by rank 0
GROUP_TIMEOUT = timedelta(days=30)
"""Timeout of the process group. It exceeds every deadline of `gather`, so the deadline of `gather` applies."""

_GRAVITY: tuple[type[RunError], ...] = (RunError, UnwrittenError, EnginesGoneError, EngineLostError, DamagedError)
"""Gravest first. The gravest of several failures decides, because a restart does not fix a plain RunError."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Value]):
    """The outcome of a call on one rank: a value, or the text of an error.

    Example: Outcome(error="engine 0 (process 4711) was ended by SIGKILL while ...", kind=EngineLostError)
    """

    value: Any = None
    error: str | None = None
    kind: type[RunError] = RunError  # class of the error, one of _GRAVITY
    mistake: tuple[str, str, str] | None = None  # what, where and fix of a UserError
    exception: BaseException | None = None  # only on the rank itself; not sent


def attempt(call: Callable[[], Value]) -> Outcome[Value]:
    """Run a call and catch its failure, to tell the other ranks."""
    try:
        return Outcome(value=call())
    except RunError as error:
        kind = next(kind for kind in reversed(_GRAVITY) if isinstance(error, kind))
        return Outcome(error=str(error), kind=kind, exception=error)
    except UserError as error:
        return Outcome(error=str(error), mistake=(error.what, error.where, error.fix), exception=error)
    except Exception as error:  # noqa: BLE001  a bug must not leave the other ranks waiting; raise_first raises it again
        return Outcome(error=f"{type(error).__name__}: {error}", exception=error)


def raise_first(outcomes: Sequence[Outcome[Any]], own: Outcome[Any]) -> None:
    """Raise the same error on all ranks if one failed.

    Raises:
        UserError: a rank found a user's mistake.
        RunError: else the gravest failure; of equal ones that of the lowest rank. It is a plain
            RunError if any of them is. A rank with a failure of this kind raises its own exception.
    """
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if not failed:
        return
    mistake = next((outcome.mistake for outcome in failed if outcome.mistake is not None), None)
    if mistake is not None:
        what, where, fix = mistake
        raise UserError(what, where=where, fix=fix)
    worst = min(failed, key=lambda outcome: _GRAVITY.index(outcome.kind))
    error = own.exception if own.kind is worst.kind else None
    error = worst.kind(worst.error) if error is None else error
    error.raised_on_all_ranks = True  # type: ignore[attr-defined]  # of any class: the other ranks raise theirs as well
    raise error


def raise_on_all(own: Outcome[Any], group: dist.ProcessGroup | None) -> None:
    """`raise_first` with the outcomes of a CPU group's ranks, within its own timeout; None: of this rank alone."""
    outcomes: list[Outcome[Any]] = [own]
    if group is not None:
        outcomes *= group.size()
        dist.all_gather_object(outcomes, replace(own, value=None, exception=None), group)
    raise_first(outcomes, own)


def timed_out(error: RuntimeError) -> bool:
    """Whether gloo gave up waiting. Otherwise a rank has died and closed its connection."""
    return "timed out" in str(error).lower()


def all_reduce(values: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """`dist.all_reduce` in place. A group of one rank needs none: a step of a small layout saves many calls."""
    if group.size() > 1:
        dist.all_reduce(values, op, group)


class Collectives:
    """All-gather of CPU objects over a separate gloo group, with a deadline for each call."""

    def __init__(self, rank: int) -> None:
        """Create the group; all ranks must call this, each with its rank. Without a process group a rank is alone."""
        self.rank = rank
        self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if dist.is_initialized() else None

    def together(self, call: Callable[[], Value], *, what: str, seconds: float) -> Value:
        """Run a call on every rank; if it fails on one, all raise the same error. Values are not sent.

        The call must not wait for other ranks. `what` and `seconds` are as for `gather`.

        Raises:
            UserError, RunError: see `raise_first`.
            DeadlineError: a rank missed the deadline.
        """
        own = attempt(call)
        self.settle(own, what=what, seconds=seconds)
        return own.value

    def settle(self, own: Outcome[Any], *, what: str, seconds: float) -> None:
        """`together` for a call that was attempted before."""
        raise_first(self.gather(replace(own, value=None), what=what, seconds=seconds), own)

    def gather(self, own: Outcome[Value], *, what: str, seconds: float) -> list[Outcome[Value]]:
        """The outcomes of all ranks, by rank.

        Args:
            own: outcome of this rank.
            what: what the ranks wait for, for the error message.
            seconds: deadline for the slowest rank.

        Raises:
            DeadlineError: a rank missed the deadline.
        """
        return self.objects(replace(own, exception=None), what=what, seconds=seconds)

    def objects(self, value: Any, *, what: str, seconds: float) -> list[Any]:
        """`gather` for any picklable value. Only the ranks of this run send to each other, so unpickling is safe.

        Payloads of similar length are padded to one length and gathered. If padding would be most of the bytes, each
        long payload is broadcast: with servers the first rank alone has all samples of a batch.
        """
        if self._group is None:
            return [value]
        deadline = time.monotonic() + seconds
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(self._group))]
        self._all_gather(counts, torch.tensor([payload.numel()]), what, seconds)
        sizes = [int(size) for size in counts]
        uneven = len(sizes) * (max(sizes) - SHORT) > 2 * sum(sizes)
        broadcast = [rank for rank, size in enumerate(sizes) if uneven and size > SHORT]
        width = max((size for rank, size in enumerate(sizes) if rank not in broadcast), default=0)
        payloads = [torch.empty(width, dtype=torch.uint8) for _ in sizes]
        padded = torch.zeros(width, dtype=torch.uint8)
        padded[: len(payload)] = payload[:width]
        self._all_gather(payloads, padded, what, max(1e-3, deadline - time.monotonic()))
        for rank in broadcast:
            payloads[rank] = payload if rank == self._group.rank() else torch.empty(sizes[rank], dtype=torch.uint8)
            work = dist.broadcast(payloads[rank], rank, group=self._group, async_op=True)
            self._wait(work, what, seconds, max(1e-3, deadline - time.monotonic()))
        return [pickle.loads(text[:size].numpy().tobytes()) for text, size in zip(payloads, sizes, strict=True)]

    def exchange(
        self,
        sent: Sequence[tuple[int, Tensor]],
        received: Sequence[tuple[int, Tensor]],
        *,
        what: str,
        seconds: float,
    ) -> None:
        """Send tensors to single ranks, and fill others with what arrives. A rank knows what it will receive.

        Args:
            sent: (rank, tensor) pairs; only the order of the tensors for one rank matters.
            received: (rank, tensor) pairs, in the order in which that rank sends them.
            what: what the ranks wait for, for the error message.
            seconds: deadline for all of them together.

        Raises:
            DeadlineError: a rank missed the deadline.
        """
        deadline = time.monotonic() + seconds
        works = [dist.isend(tensor, rank, group=self._group) for rank, tensor in sent]
        works += [dist.irecv(tensor, rank, group=self._group) for rank, tensor in received]
        for work in works:
            self._wait(work, what, seconds, max(1e-3, deadline - time.monotonic()))

    def _all_gather(self, results: list[Tensor], own: Tensor, what: str, seconds: float) -> None:
        work, left = dist.all_gather(results, own, group=self._group, async_op=True), seconds
        if self.rank == 0 and seconds > SILENT_S:
            if _came(work, SILENT_S):
                return
            left -= SILENT_S
            said = "rank 0 has waited %.0f s for the other ranks and %s; it gives up after %.0f s"
            logger.warning(said, SILENT_S, what, seconds)
        self._wait(work, what, seconds, left)

    def _wait(self, work: dist.Work | None, what: str, seconds: float, left: float) -> None:
        if not _came(work, left):
            raise DeadlineError(f"rank {self.rank}", f"the other ranks and {what}", seconds)


def _came(work: dist.Work | None, seconds: float) -> bool:
    """Whether the other ranks came within so many seconds."""
    assert work is not None, "this rank belongs to the group"
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        if not timed_out(error):
            raise
        return False
    return True
