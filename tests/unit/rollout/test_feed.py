"""The queue between a sampling thread and the step loop: how much one call takes, and how a call ends."""

from __future__ import annotations

import threading

import pytest

from oblr_megatron.errors import RunError
from oblr_megatron.rewards.base import RewardResult
from oblr_megatron.rollout.feed import Feed, Groups, Put
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
    assert list(feed.collect(tokens=3, seconds=60).groups) == [0, 1, 2, 3, 4]
    assert feed.collect(tokens=3, seconds=0.01).groups == {}, "nothing came in time"
    finish.set()
    arrived = feed.collect(tokens=4, seconds=60)
    assert list(arrived.groups) == [5], "fewer tokens than asked for, because nothing else comes"
    assert arrived.end is not None and arrived.end.exception is None


def test_the_error_of_a_thread_is_its_end() -> None:
    def run(put: Put) -> None:
        put(0, GROUP)
        raise ValueError("no engine")

    feed = Feed(run)
    arrived = feed.collect(tokens=100, seconds=60)
    assert list(arrived.groups) == [0]
    assert arrived.end is not None and isinstance(arrived.end.exception, ValueError)
    assert arrived.sent().end is not None and arrived.sent().end.exception is None
    with pytest.raises(ValueError, match="no engine"):
        raise arrived.end.exception


def values(groups: Groups) -> list[RewardResult]:
    return [RewardResult([float(position)] * len(group)) for position, group in groups.items()]


def test_groups_are_scored_while_nobody_takes_them_and_others_are_sampled() -> None:
    """A slow score gets all groups that came during its last call in one call."""
    calls: list[list[int]] = []
    scored, second, finish = threading.Event(), threading.Event(), threading.Event()

    def run(put: Put) -> None:
        put(7, GROUP)
        assert scored.wait(60), "before anybody takes it"
        for position in (3, 5):
            put(position, GROUP)
        second.set()
        assert finish.wait(60)

    def score(groups: Groups) -> list[RewardResult]:
        calls.append(list(groups))
        scored.set()
        assert second.wait(60)
        return values(groups)

    feed = Feed(run, score)
    found = feed.collect(tokens=9, seconds=60)
    assert list(found.groups) == [7, 3, 5] and calls == [[7], [3, 5]]
    assert {position: result.rewards for position, result in found.rewards.items()} == {7: [7.0], 3: [3.0], 5: [5.0]}
    assert found.sent().rewards == found.rewards and found.end is None
    finish.set()
    assert feed.collect(tokens=1, seconds=60).end is not None and len(calls) == 2


def test_the_end_of_the_sampling_comes_after_the_rewards() -> None:
    def run(put: Put) -> None:
        put(0, GROUP)
        raise RunError("the engine is lost")

    arrived = Feed(run, values).collect(tokens=100, seconds=60)
    assert arrived.rewards.keys() == {0} and arrived.end is not None and arrived.end.error == "the engine is lost"


def test_the_error_of_a_score_is_the_end() -> None:
    sampled = threading.Event()

    def run(put: Put) -> None:
        put(0, GROUP)
        assert sampled.wait(60)

    def score(groups: Groups) -> list[RewardResult]:
        raise RunError("the reward workers could not start")

    arrived = Feed(run, score).collect(tokens=100, seconds=60)
    sampled.set()
    assert not arrived.groups and arrived.end is not None and "workers" in str(arrived.end.error)
