"""Prompts that engines have finished, on their way from a sampling thread to the step loop.

feed = Feed(lambda put: engine_samples(put))     # put(position, group) for each finished prompt, in a thread
arrived = feed.take(tokens=4096, seconds=0.2)    # at least so many tokens, or what came in time
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from oblr_megatron.rollout.routes import without_routes
from oblr_megatron.runtime.collectives import Outcome, attempt

if TYPE_CHECKING:
    from oblr_megatron.types import Sample

Groups = dict[int, list["Sample"]]
"""The group of responses of each finished prompt, by the prompt's position in the batch."""

Put = Callable[[int, list["Sample"]], None]
"""(position of a prompt, its responses): called once for each finished prompt."""


@dataclass(slots=True)
class Arrived:
    """What a feed has brought since the last call. Example: Arrived(groups={3: [sample, sample]})"""

    groups: Groups = field(default_factory=dict)
    end: Outcome[None] | None = None  # of the thread, once it has ended: nothing further comes

    def sent(self) -> Arrived:
        """The same without what only this rank can hold, and without routes, which stay on it (`rollout.routes`)."""
        groups = {position: without_routes(group) for position, group in self.groups.items()}
        return Arrived(groups, self.end and replace(self.end, exception=None))


class Feed:
    """Runs a call in a thread and queues the groups that it puts. The call has its own deadline."""

    def __init__(self, run: Callable[[Put], None]) -> None:
        """Start the thread."""
        self._queue: queue.SimpleQueue[tuple[int, list[Sample]] | Outcome[None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(run,), name="feed", daemon=True)
        self._thread.start()

    def take(self, tokens: float, seconds: float) -> Arrived:
        """Wait for groups with at least `tokens` tokens, for the end of the thread, or for `seconds`.

        Everything that has come by then is taken: the more responses share a pass, the less is padded.
        """
        arrived, size, deadline = Arrived(), 0, time.monotonic() + seconds
        while arrived.end is None:
            left = max(0.0, deadline - time.monotonic()) if size < tokens else 0.0
            try:
                item = self._queue.get(timeout=left) if left else self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Outcome):
                arrived.end = item
                self._thread.join()
            else:
                position, group = item
                arrived.groups[position] = group
                size += num_tokens(group)
        return arrived

    def _run(self, run: Callable[[Put], None]) -> None:
        self._queue.put(attempt(lambda: run(lambda position, group: self._queue.put((position, group)))))


def num_tokens(group: Sequence[Sample]) -> int:
    """Tokens of all prompts and responses of a group."""
    return sum(sample.num_tokens for sample in group)
