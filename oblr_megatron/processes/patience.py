"""When to give up a batch, because the reward function or service hangs in every call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oblr_megatron.processes.calls import Score

MIN_LATE = 8  # calls


class Patience:
    """Recognizes a function that always hangs, so that a batch does not wait for a deadline for each of its calls.

    Patience ends for a batch when its first calls were late and no call of the run ever gave a score. The first calls
    are spread over the batch, because the responses to one prompt may all be slow. The next batch begins again.

    Example: 512 calls of 10 s in 2 workers end after 40 s instead of 43 minutes.
    """

    def __init__(self, at_once: int) -> None:
        """`at_once`: calls at a time."""
        self.limit = max(MIN_LATE, 2 * at_once)
        self.late = 0  # calls of this batch
        self.scored = False  # in the whole run

    def begin(self, count: int) -> Iterator[int]:
        """Positions of a new batch's calls, in the order in which to make them; none while patience has ended.

        Threads may share the iterator: `next` on it is atomic.
        """
        self.late = 0
        stride = max(1, count // self.limit)
        order = sorted(range(count), key=lambda position: position % stride)
        return filter(lambda position: not self.ended, order)

    @property
    def ended(self) -> bool:
        """Whether the remaining calls of the batch count as late without being made."""
        return self.late >= self.limit and not self.scored

    def note(self, scores: Sequence[Score]) -> None:
        """Note the result of a call."""
        if all(score.timed_out for score in scores):
            self.late += 1
        elif not all(score.error or score.timed_out for score in scores):
            self.scored = True
