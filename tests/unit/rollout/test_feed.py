"""The queue between a sampling thread and the step loop: how much one call takes, and how a call ends."""

from __future__ import annotations

import threading

import pytest

from oblr_megatron.rollout.feed import Feed, Put
from oblr_megatron.types import Sample

SAMPLE = Sample(
    group=0, prompt_ids=(1,), response_ids=(2, 3), logprobs=(-1.0, -1.0), text="", finish_reason="stop", version=0
)
GROUP = [SAMPLE]


def test_a_call_takes_everything_that_has_come() -> None:
    """A trainer that was busy gets one large wave instead of several small ones."""
    put_all, finish = threading.Event(), threading.Event()

    def run(put: Put) -> None:
        for position in range(5):
            put(position, GROUP)
        put_all.set()
        assert finish.wait(60)
        put(5, GROUP)

    feed = Feed(run)
    assert put_all.wait(60)
    assert list(feed.take(tokens=3, seconds=60).groups) == [0, 1, 2, 3, 4]
    assert feed.take(tokens=3, seconds=0.01).groups == {}, "nothing came in time"
    finish.set()
    arrived = feed.take(tokens=4, seconds=60)
    assert list(arrived.groups) == [5], "fewer tokens than asked for, because nothing else comes"
    assert arrived.end is not None and arrived.end.exception is None


def test_the_error_of_a_thread_is_its_end() -> None:
    def run(put: Put) -> None:
        put(0, GROUP)
        raise ValueError("no engine")

    feed = Feed(run)
    arrived = feed.take(tokens=100, seconds=60)
    assert list(arrived.groups) == [0]
    assert arrived.end is not None and isinstance(arrived.end.exception, ValueError)
    assert arrived.sent().end is not None and arrived.sent().end.exception is None
    with pytest.raises(ValueError, match="no engine"):
        raise arrived.end.exception
