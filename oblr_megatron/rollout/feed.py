"""Prompts that engines have finished, on their way from a sampling thread to the step loop.

    feed = Feed(lambda put: engine_samples(put))     # put(position, group) for each finished prompt, in a thread
    arrived = feed.collect(tokens=4096, seconds=0.2) # at least so many tokens, or what came in time

With a score, a second thread scores the groups on their way, all that have come in one call. So rewards that take long,
such as those of a judge, are computed while the trainer works and the engines sample the rest.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from oblr_megatron.rewards.base import RewardResult
from oblr_megatron.rollout.routes import without_routes
from oblr_megatron.runtime.collectives import Outcome, attempt
from oblr_megatron.types import Sample

Groups = dict[int, list[Sample]]
"""The group of responses of each finished prompt, by the prompt's position in the batch."""

Score = Callable[[Groups], list[RewardResult]]
"""Groups -> the rewards of each, in their order."""

Put = Callable[[int, list[Sample]], None]
"""(position of a prompt, its responses): called once for each finished prompt."""


@dataclass(slots=True)
class Arrived:
    """Results that a feed has brought since the last call. Example: Arrived(groups={3: [sample, sample]})"""

    groups: Groups = field(default_factory=dict)
    rewards: dict[int, RewardResult] = field(default_factory=dict)  # rewards of the groups, if the feed scores
    end: Outcome[Any] | None = None  # the threads' end: nothing further comes

    def add(self, later: Arrived) -> None:
        """Append what came later."""
        self.groups |= later.groups
        self.rewards |= later.rewards
        self.end = later.end

    def sent(self) -> Arrived:
        """The same without what only this rank can hold, and without routes, which stay on it (`rollout.routes`)."""
        groups = {position: without_routes(group) for position, group in self.groups.items()}
        return Arrived(groups, self.rewards, self.end and replace(self.end, exception=None))


class Feed:
    """Runs a call in a thread and queues the groups that it puts. The call has its own deadline, and so has a score."""

    def __init__(self, run: Callable[[Put], None], score: Score | None = None) -> None:
        """Start the threads."""
        self._ready: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        sampled: queue.SimpleQueue[Arrived] = self._ready if score is None else queue.SimpleQueue()
        threading.Thread(target=_sample, args=(run, sampled), name="feed", daemon=True).start()
        if score is not None:
            threading.Thread(target=_score, args=(score, sampled, self._ready), name="score", daemon=True).start()

    def collect(self, tokens: float, seconds: float) -> Arrived:
        """Wait for groups with at least `tokens` tokens, for the end of the thread, or for `seconds`.

        Everything that has come by then is returned: the more responses share a pass, the less is padded.
        """
        arrived, size, deadline = Arrived(), 0, time.monotonic() + seconds
        while arrived.end is None:
            left = max(0.0, deadline - time.monotonic()) if size < tokens else 0.0
            try:
                part = self._ready.get(timeout=left) if left else self._ready.get_nowait()
            except queue.Empty:
                break
            arrived.add(part)
            size += sum(map(num_tokens, part.groups.values()))
        return arrived


def _sample(run: Callable[[Put], None], sampled: queue.SimpleQueue[Arrived]) -> None:
    end = attempt(lambda: run(lambda position, group: sampled.put(Arrived({position: group}))))
    sampled.put(Arrived(end=end))


def _score(score: Score, sampled: queue.SimpleQueue[Arrived], ready: queue.SimpleQueue[Arrived]) -> None:
    """Score everything that has come, again and again, until the end of the sampling or an error."""
    part = Arrived()
    while part.end is None:
        part = sampled.get()
        while part.end is None and not sampled.empty():  # no other thread takes from it
            part.add(sampled.get())
        if part.groups:
            outcome = attempt(partial(score, part.groups))
            if outcome.exception is None:
                part.rewards = dict(zip(part.groups, outcome.value, strict=True))
            else:
                part = Arrived(end=outcome)
        ready.put(part)


def num_tokens(group: Sequence[Sample]) -> int:
    """Tokens of all prompts and responses of a group."""
    return sum(sample.num_tokens for sample in group)
