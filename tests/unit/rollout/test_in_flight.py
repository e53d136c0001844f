"""Rounds of a batch that is being sampled. Not covered: real engines, several ranks (tests/e2e/test_streamed.py)."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from oblr_megatron.engine.protocol import SamplingRequest
from oblr_megatron.rollout.feed import Arrived, Feed, Put
from oblr_megatron.rollout.in_flight import InFlight
from tests.unit.rollout.test_feed import GROUP, SAMPLE


def test_a_later_round_waits_only_for_the_tokens_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, second_round, collect = list[float](), threading.Event(), Feed.collect

    def noted(feed: Feed, tokens: float, seconds: float) -> Arrived:
        asked.append(tokens)
        if len(asked) == 2:
            second_round.set()
        return collect(feed, tokens, seconds)

    def run(put: Put) -> None:
        put(0, GROUP)
        assert second_round.wait(60)
        put(1, GROUP)

    engines: Any = SimpleNamespace(
        until_done=lambda call: call(),
        ready=lambda: None,
        sampler=lambda *_, whole: run,
        gather=lambda own, what, seconds: [own],
        version=SAMPLE.version,
        recovery=SimpleNamespace(sampled=lambda: None),
    )
    monkeypatch.setattr(Feed, "collect", noted)
    request, prompts = SamplingRequest(group_size=1, temperature=1.0, max_tokens=2, seed=0), [SimpleNamespace()] * 2
    batch = InFlight(engines, prompts, request, whole=False)  # type: ignore[arg-type]
    found = batch.next_groups(SAMPLE.num_tokens + 1, seconds=0.05)
    assert list(found) == [0, 1] and asked[:2] == [SAMPLE.num_tokens + 1, 1]
