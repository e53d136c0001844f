"""What one rank learns, all ranks hear before any of them goes on; so they decide alike, and none waits for ever.

exchange = Exchange(rank=parallel.rank)                           # collective: every rank makes one
own = attempt(lambda: engine.generate(...))                       # on a rank without an engine: nothing to do
outcomes = exchange.gather(own, what="64 prompts", seconds=60)    # by rank; at most 60 s after this rank was done
raise_first(outcomes, own)                                        # the same error everywhere, or none
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.errors import DamagedError, DeadlineError, EngineLostError, RunError

Value = TypeVar("Value")

GROUP_TIMEOUT = timedelta(days=30)
"""Of the process group: far beyond every deadline given to `gather`, which is the one that counts."""

_GRAVITY: tuple[type[RunError], ...] = (RunError, EngineLostError, DamagedError)
"""Gravest first. With several failures the gravest decides: a restart does not mend what a new engine would refuse."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Value]):
    """How a call ended on one rank: with a value, or with an error's text.

    Example: Outcome(error="engine 0 (process 4711) was ended by SIGKILL while ...", kind=EngineLostError)
    """

    value: Any = None
    error: str | None = None
    kind: type[RunError] = RunError  # of the error: one of _GRAVITY
    exception: BaseException | None = None  # on the rank itself; it does not travel


def attempt(call: Callable[[], Value]) -> Outcome[Value]:
    """Run something whose failure the other ranks have to hear of."""
    try:
        return Outcome(value=call())
    except RunError as error:
        kind = next(kind for kind in reversed(_GRAVITY) if isinstance(error, kind))
        return Outcome(error=str(error), kind=kind, exception=error)
    except Exception as error:  # noqa: BLE001  a bug here must not leave the other ranks waiting; it is raised again
        return Outcome(error=f"{type(error).__name__}: {error}", exception=error)


def raise_first(outcomes: Sequence[Outcome[Any]], own: Outcome[Any]) -> None:
    """End all ranks alike if one failed.

    Raises:
        RunError: the gravest failure, of equals the first in the order of ranks: `EngineLostError` where every failure
            is a loss, `DamagedError` where all are damaged buckets. A rank that failed so itself raises its own.
    """
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if not failed:
        return
    worst = min(failed, key=lambda outcome: _GRAVITY.index(outcome.kind))
    if own.exception is not None and own.kind is worst.kind:
        raise own.exception
    raise worst.kind(worst.error)


class Collectives:
    """A gloo group of its own: it takes CPU objects where the trainer talks over NCCL, and each call has a deadline."""

    def __init__(self, rank: int) -> None:
        """Collective where there is a process group; without one, a rank is alone.

        Args:
            rank: of this process, for messages.
        """
        self._rank = rank
        self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if dist.is_initialized() else None

    def gather(self, own: Outcome[Value], *, what: str, seconds: float) -> list[Outcome[Value]]:
        """Every rank's outcome, by rank.

        Args:
            own: of this rank.
            what: is waited for, in the error message.
            seconds: what the slowest rank may still need.

        Raises:
            DeadlineError: a rank did not come.
        """
        message = replace(own, exception=None)
        return [message] if self._group is None else self.objects(message, what=what, seconds=seconds)

    def objects(self, value: Any, *, what: str, seconds: float) -> list[Any]:
        """`gather` of anything picklable; ranks only send each other what they pickled themselves."""
        if self._group is None:
            return [value]
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        ranks = range(dist.get_world_size(self._group))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
        self._all_gather(sizes, torch.tensor([payload.numel()]), what, seconds)
        longest = max(int(size) for size in sizes)
        payloads = [torch.empty(longest, dtype=torch.uint8) for _ in ranks]
        padded = torch.nn.functional.pad(payload, (0, longest - payload.numel()))
        self._all_gather(payloads, padded, what, seconds)
        return [pickle.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(payloads, sizes, strict=True)]

    def _all_gather(self, results: list[Tensor], own: Tensor, what: str, seconds: float) -> None:
        work = dist.all_gather(results, own, group=self._group, async_op=True)
        assert work is not None, "this rank belongs to the group"
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise  # a rank has gone, and its connection with it
            raise DeadlineError(f"rank {self._rank}", f"the other ranks and {what}", seconds) from error
