"""A response that a `VllmEngine` samples in an episode of several turns. Imports no vllm and no torch.

answers = engine.begin_turns()                             # read it in a thread
engine.ask([PromptRequest(7, (5, 9), request, position=0)])
next(answers)                                              # [(7, Turn(...))], as soon as the response has ended
engine.end_turns()
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

from oblr_megatron.engine.http_messages import ended_of
from oblr_megatron.types import Sample


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the policy. Example: Turn(ids=(7, 1), logprobs=(-0.1, -0.02), text="5", finish_reason="stop")"""

    ids: tuple[int, ...]  # an end-of-sequence or stop token is the last one
    logprobs: tuple[float, ...]
    text: str  # without special tokens
    finish_reason: Literal["stop", "length"]
    recorded: NDArray[Any] | None = field(default=None, compare=False, repr=False)  # as `Sample.recorded`

    @classmethod
    def of(cls, sample: Sample) -> Turn:
        """The response of an engine's sample."""
        return cls(sample.response_ids, sample.logprobs, sample.text, ended_of(sample), sample.recorded)


Answered = list[tuple[int, Turn]]
"""Numbers of requests with their responses."""
