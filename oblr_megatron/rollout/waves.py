"""The prompts of a step in the order in which they become ready for the gradient.

Without `rollout.overlap` all prompts are one wave. With "stream" a wave has the prompts that were finished since the
wave before it. Prompts keep their positions in the batch, and `Collected` restores the batch at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oblr_megatron.rollout.dynamic_sampling import Batch, assembled
from oblr_megatron.types import Prompt, Sample, Scored


@dataclass(frozen=True, slots=True)
class Wave:
    """Prompts with their responses and rewards.

    Example: Wave([3, 7], Batch(...), last=False)
    """

    positions: Sequence[int]  # [k] of the prompts in the step's batch, ascending
    batch: Batch
    last: bool  # whether all prompts of the step have now come

    @property
    def prompts(self) -> list[Prompt]:
        """The k prompts."""
        return self.batch.prompts

    @property
    def samples(self) -> list[Sample]:
        """Their k * G samples, prompt-major."""
        return self.batch.samples

    @property
    def scored(self) -> Scored:
        """Their rewards [k, G]."""
        return self.batch.scored


def whole_step(batch: Batch) -> Wave:
    """All prompts of a step as one wave."""
    return Wave(range(len(batch.scored.rewards)), batch, last=True)


def mini_batches(wave: Wave, count: int) -> list[Wave]:
    """The prompts of a wave in `count` equal parts, in order; the wave itself if `count` is 1."""
    if count == 1:
        return [wave]
    size = len(wave.positions) // count
    parts = [range(start, start + size) for start in range(0, size * count, size)]
    return [
        Wave(part, assembled({place: (wave.batch, place) for place in part}, failures=0), last=wave.last)
        for part in parts
    ]


class Collected:
    """The waves of a step so far, by position."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[Batch, int]] = {}  # position in the step -> the prompt in one of the batches
        self._failures = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, positions: Sequence[int], batch: Batch) -> None:
        """Keep the prompts at these positions."""
        self._places |= {position: (batch, place) for place, position in enumerate(positions)}
        self._failures += batch.scored.failures

    def part(self, positions: Sequence[int]) -> Batch:
        """The prompts at some positions, without the count of failures, which belongs to the whole batch."""
        return assembled({position: self._places[position] for position in positions}, failures=0)

    def whole(self) -> Batch:
        """All of them in the order of their positions."""
        return assembled(dict(sorted(self._places.items(), key=lambda item: item[0])), failures=self._failures)
