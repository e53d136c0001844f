"""Single responses to prompts that come while an engine samples, as episodes of several turns need them.

    engine.begin_turns()                                       # a call of `VllmEngine`; read its replies in a thread
    engine.ask([TurnRequest(number=7, ids=(5, 9), request=request, turn=0)])
    7, Turn(ids=(4, 1), ...)                                   # a reply, as soon as the response has ended
    engine.ask(None)                                           # ends the call

The engine batches continuously: a request joins the next decoding step. Imports no vllm and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from oblr_megatron.engine.channel import Channel
from oblr_megatron.engine.protocol import SamplingRequest


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the policy. Example: Turn(ids=(7, 1), logprobs=(-0.1, -0.02), text="5", finish_reason="stop")"""

    ids: tuple[int, ...]  # an end-of-sequence or stop token is the last one
    logprobs: tuple[float, ...]
    text: str  # without special tokens
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One response to sample. Example: TurnRequest(number=7, ids=(5, 9), request=SamplingRequest(1, 1.0, 64, 3))"""

    number: int  # names the request in replies
    ids: tuple[int, ...]  # everything so far: prompt, earlier responses, observations
    request: SamplingRequest  # of one response; the seed is the episode's
    turn: int = 0  # decides the seed, together with the episode's
    stop: tuple[int, ...] = ()  # tokens that end the response, in addition to the model's


@dataclass(frozen=True, slots=True)
class Abandon:
    """Requests that nobody waits for any more. Example: Abandon(numbers=(7, 9))"""

    numbers: tuple[int, ...]


TurnMessage = TurnRequest | Abandon
Inbox = Callable[[bool], Sequence[TurnMessage] | None]
"""(whether to wait for one) -> messages that have come; None at the end of the call."""
Answered = list[tuple[int, Turn]]
"""Numbers of requests with their responses."""


def inbox_of(channel: Channel) -> Inbox:
    """The messages that the trainer sends during a call."""

    def read(wait: bool) -> Sequence[TurnMessage] | None:
        found: list[TurnMessage] = []
        while channel.ready() or (wait and not found):
            messages: Sequence[TurnMessage] | None = channel.receive()
            if messages is None:
                return None
            found += messages
        return found

    return read
