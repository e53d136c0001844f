"""Messages between a rank (host.py) and its environment process (process.py). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from oblr_megatron.engine.turns import Turn
from oblr_megatron.types import FinishReason, Prompt


@dataclass(frozen=True, slots=True)
class Begin:
    """An episode to run. Example: Begin(number=3, prompt=Prompt(...), seed=71, max_tokens=256)"""

    number: int
    prompt: Prompt
    seed: int
    max_tokens: int  # of everything after the prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to a `SampleCall`."""

    number: int
    call: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class Cancel:
    """An episode has reached its deadline."""

    number: int


@dataclass(frozen=True, slots=True)
class SampleCall:
    """An episode waits for a response. Example: SampleCall(number=3, call=0, ids=(5, 9), max_tokens=64)"""

    number: int  # of the episode
    call: int  # counted from 0
    ids: tuple[int, ...]
    max_tokens: int
    stop: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolWait:
    """A tool call of an episode waits for a worker (+1), or has one or needs none any more (-1)."""

    number: int
    change: int


@dataclass(frozen=True, slots=True)
class Ended:
    """An episode has ended.

    Example: Ended(number=3, ids=(7, 2, 1), logprobs=(-0.1, 0.0, -0.3), mask=(True, False, True), text="5")
    """

    number: int
    ids: tuple[int, ...] = ()  # after the prompt
    logprobs: tuple[float, ...] = ()
    mask: tuple[bool, ...] = ()
    text: str = ""
    finish_reason: FinishReason = "stop"
    reward: float | None = None
    error: str = ""  # why it failed or was late
    recorded: NDArray[Any] | None = field(default=None, compare=False, repr=False)  # as `Sample.recorded`
