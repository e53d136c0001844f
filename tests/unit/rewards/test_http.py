"""Rewards from a service: requests, retries, deadlines; no answer of the service ends a run.

The services are real and local (http_service.py). Not covered: TLS, proxies.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from typing import Any

import pytest

from oblr_megatron.config import RewardConfig
from oblr_megatron.errors import UserError
from oblr_megatron.processes.patience import MIN_LATE
from oblr_megatron.rewards import http
from oblr_megatron.rewards.base import Reward, RewardResult
from oblr_megatron.rewards.http import HttpReward, _seconds
from oblr_megatron.rewards.registry import build_reward, check_reward
from tests.unit.rewards.conftest import batch
from tests.unit.rewards.http_service import (
    Asked,
    Handler,
    Step,
    cut,
    drip,
    drop,
    flood,
    hang,
    score_batch,
    serving,
    status,
    text,
)

GROUPS = [("4", ["a", "bb"]), ("5", ["ccc", ""])]
LENGTHS = [1.0, 2.0, 3.0, 0.0]
ALL = range(4)


def build(url: str, **options: object) -> Reward:
    config = RewardConfig.model_validate({"name": url, "num_workers": 1, "timeout_s": 20.0, **options})
    return build_reward(config, max_response_tokens=16)


def score(*steps: Step, **options: object) -> tuple[RewardResult, list[Asked]]:
    with serving(*steps) as service, build(service.url, **options) as reward:
        return reward.score(*batch(GROUPS)), service.asked


def test_the_body_of_a_request() -> None:
    result, asked = score(score_batch)
    assert (result.rewards, result.faults, result.error) == (LENGTHS, {}, None)
    assert [one.body for one in asked] == [
        {
            "responses": ["a", "bb", "ccc", ""],
            "answers": ["4", "4", "5", "5"],
            "prompts": ["prompt 0", "prompt 0", "prompt 1", "prompt 1"],
        }
    ]
    assert asked[0].token is None


def test_send_rows_adds_the_columns_of_the_rows() -> None:
    _, asked = score(score_batch, send_rows=True)
    first, second = {"answer": "4", "level": 1}, {"answer": "5", "level": 2}
    assert asked[0].body["rows"] == [first, first, second, second]
    assert asked[0].body["answers"] == ["4", "4", "5", "5"]


def test_rows_are_sent_as_strict_json() -> None:
    prompts, samples = batch([("4", ["a"])])
    prompts = [replace(prompts[0], columns='{"x": NaN, "more": [-Infinity, 1.5, "NaN"]}')]
    with serving(score_batch) as service, build(service.url, send_rows=True) as reward:
        assert reward.score(prompts, samples).rewards == [1.0]
    assert service.asked[0].body["rows"] == [{"x": None, "more": [None, 1.5, "NaN"]}]


def test_a_service_that_hangs_does_not_cost_a_deadline_for_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, post, sent = [("4", ["a"])] * 40, HttpReward._post, []

    async def counted(reward: HttpReward, *request: Any) -> bytes:
        sent.append(request)
        return await post(reward, *request)

    monkeypatch.setattr(HttpReward, "_post", counted)
    with serving(hang) as service, build(service.url, batch_size=1, num_workers=4, timeout_s=0.3) as reward:
        result = reward.score(*batch(groups))
        assert result.timeouts == 40
        assert MIN_LATE <= len(sent) < MIN_LATE + 4, "the last ones were under way"
        assert len(service.asked) <= len(sent)


def test_batches_consist_of_whole_groups_and_values_stay_in_order() -> None:
    result, asked = score(score_batch, batch_size=1, num_workers=2)
    assert result.rewards == LENGTHS
    assert sorted(one.body["responses"] for one in asked) == [["a", "bb"], ["ccc", ""]]


def test_any_text_is_sent_unchanged() -> None:
    responses = ['"\\\n\x00', "\u2028 \U0001f600", "\ud800 alone"]
    with serving(score_batch) as service, build(service.url) as reward:
        assert reward.score(*batch([("", responses)])).rewards == [4.0, 3.0, 7.0]
        assert service.asked[0].body["responses"] == responses


def test_num_workers_is_the_number_of_requests_in_flight() -> None:
    barrier, lock, counts = threading.Barrier(2), threading.Lock(), [0, 0]  # current, maximum

    def meet(handler: Handler, asked: Asked) -> None:
        with lock:
            counts[0] += 1
            counts[1] = max(counts)
        barrier.wait(20)
        time.sleep(0.1)  # a third concurrent request would be counted here
        with lock:
            counts[0] -= 1
        score_batch(handler, asked)

    with serving(meet) as service, build(service.url, batch_size=1, num_workers=2) as reward:
        result = reward.score(*batch([("", ["a"])] * 6))
    assert (result.rewards, result.faults) == ([1.0] * 6, {}), "the barrier lets requests pass in pairs"
    assert counts[1] == 2


def test_consecutive_batches() -> None:
    with serving(score_batch) as service, build(service.url) as reward:
        assert [reward.score(*batch(GROUPS)).rewards for _ in range(3)] == [LENGTHS] * 3
        assert reward.score([], []).rewards == []
        reward.close()
        reward.close()


@pytest.mark.parametrize("trouble", [drop, cut, status(500), status(503), status(429, Retry_After="0")])
def test_transient_errors_are_retried(trouble: Step) -> None:
    result, asked = score(trouble, trouble, score_batch)
    assert (result.rewards, result.faults, len(asked)) == (LENGTHS, {}, 3)
    assert asked[0].body == asked[1].body == asked[2].body


def test_the_number_of_retries() -> None:
    result, asked = score(status(500), status(503), status(500), status(500), score_batch)
    assert (result.rewards, result.failures, len(asked)) == ([0] * 4, 4, 4)
    assert result.error


@pytest.mark.parametrize("trouble", [drop, cut])
def test_a_service_that_starts_again_before_the_deadline_costs_no_reward(
    trouble: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outage is longer than the pauses of RETRIES retries."""
    monkeypatch.setattr(http, "BACKOFF_S", 0.01)
    result, asked = score(*[trouble] * 6, score_batch)
    assert (result.rewards, result.faults, len(asked)) == (LENGTHS, {}, 7)


def test_dropped_connections_use_up_no_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that starts refuses connections, and then answers 503 until its model is loaded."""
    monkeypatch.setattr(http, "BACKOFF_S", 0.01)
    result, asked = score(drop, drop, drop, drop, status(503), status(503), status(503), score_batch)
    assert (result.rewards, result.faults, len(asked)) == (LENGTHS, {}, 8)


def test_pauses_double() -> None:
    _, asked = score(status(500))
    times = [one.at for one in asked]
    pauses = [after - before for before, after in pairwise(times)]
    assert all(pause >= 0.1 * 2**place for place, pause in enumerate(pauses)) and len(pauses) == 3


@pytest.mark.parametrize("named", ["seconds", "date"])
def test_retry_after_is_respected(named: str) -> None:
    """The date is made with the answer: its whole seconds are one to two seconds ahead."""

    def later(handler: Handler, asked: Asked) -> None:
        date = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
        status(429, Retry_After="1" if named == "seconds" else date)(handler, asked)

    result, asked = score(later, score_batch)
    assert (result.rewards, len(asked)) == (LENGTHS, 2)
    assert asked[1].at - asked[0].at >= 0.9


def test_a_date_beyond_the_calendar_is_no_pause() -> None:
    assert _seconds(f"Wed, 21 Oct 2015 07:28:00 +{'9' * 20}") == 0.0


def test_retry_after_beyond_the_deadline_fails_at_once() -> None:
    result, asked = score(status(503, Retry_After="3600"), score_batch)
    assert (result.failures, result.timeouts, len(asked)) == (4, 0, 1)
    assert "status 503" in (result.error or "")


@pytest.mark.parametrize(
    ("trouble", "named"),
    [
        (status(401), 'status 401: \'{"error": "not now"}\''),
        (status(404), "status 404"),
        (status(422), "status 422"),
        (status(301, Location="/elsewhere"), "status 301"),
        (status(202), "status 202"),
        (text(b"garbage"), "garbage"),
        (text(b"\xff\xfe\x00"), "[...]}: '\ufffd"),
        (text(b"[" * 100_000), "[...]}: '[[["),
        (text(b'["rewards"]'), "[...]}: '["),
        (text(b'{"scores": [1, 1, 1, 1]}'), '{"scores"'),
        (text(b'{"rewards": 1}'), "no list of rewards for 4"),
        (text(b'{"rewards": {"a": 1, "b": 1, "c": 1, "d": 1}}'), "no list of rewards for 4"),
        (text(b'{"rewards": [1, 1, 1]}'), "3 rewards for 4"),
        (text(b'{"rewards": [' + b"1" * 5000 + b"]}"), "[111"),
        (flood, "more than"),
    ],
)
def test_permanent_errors_are_not_retried(trouble: Step, named: str) -> None:
    result, asked = score(trouble, score_batch)
    assert (result.rewards, result.failures, result.timeouts, len(asked)) == ([0] * 4, 4, 0, 1)
    assert named in (result.error or "") and "http://127.0.0.1" in (result.error or "")


def test_a_value_that_is_not_a_number_fails_only_its_sample() -> None:
    result, _ = score(text(b'{"rewards": [NaN, null, 1e999, 0.5]}'))
    assert (result.rewards, result.failures) == ([0, 0, 0, 0.5], 3)
    result, _ = score(text(b'{"rewards": ["1", true, [1], 1' + b"0" * 400 + b"]}"))
    assert (result.rewards, result.faults) == ([0, 1, 0, 0], {0: "failed", 2: "failed", 3: "failed"})


@pytest.mark.parametrize("trouble", [hang, drip])
def test_the_deadline_is_hard(trouble: Step) -> None:
    result, _ = score(trouble, timeout_s=0.5)
    assert (result.rewards, result.failures, result.timeouts) == ([0] * 4, 0, 4)


def test_the_deadline_of_each_request_includes_its_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request hangs, one hangs after an error, which is kept, one has errors without end, one is answered."""
    monkeypatch.setattr(http, "RETRIES", 1000)

    def each(handler: Handler, asked: Asked) -> None:
        again = sum(one.body == asked.body for one in handler.server.service.asked) > 1
        steps = {"a": hang, "bb": hang if again else status(500), "ccc": status(500)}
        steps.get(asked.body["responses"][0], score_batch)(handler, asked)

    with serving(each) as service, build(service.url, batch_size=1, num_workers=4, timeout_s=7.0) as reward:
        result = reward.score(*batch([("", ["a"]), ("", ["bb"]), ("", ["ccc"]), ("", ["dddd"])]))
    assert (result.rewards, result.faults) == ([0, 0, 0, 4], {0: "late", 1: "failed", 2: "failed"})
    assert "status 500" in (result.error or "")
    assert 2 <= sum(one.body["responses"] == ["ccc"] for one in service.asked) < 20


def test_a_service_that_stops_does_not_end_the_run() -> None:
    with serving(score_batch) as service:
        reward = build(service.url, timeout_s=20.0)
        assert reward.score(*batch(GROUPS)).rewards == LENGTHS
    with reward:
        result = reward.score(*batch(GROUPS))
    assert result.failures == 4 and service.url in (result.error or "")


def test_every_request_has_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_KEY", "s3cret\n")
    _, asked = score(score_batch, batch_size=1, api_key_env="REWARD_KEY")
    assert [one.token for one in asked] == ["Bearer s3cret"] * 2


@pytest.mark.parametrize("value", [None, "", "  ", "two\nlines", "schlüssel"])
def test_a_missing_or_malformed_token(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REWARD_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("REWARD_KEY", value)
    with serving(score_batch) as service, pytest.raises(UserError, match="REWARD_KEY") as caught:
        build(service.url, api_key_env="REWARD_KEY")
    assert "two" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://", "http:///score", "https://:80", "http://host:notaport/", "http://host:99999/", "http://[::1/",
        "http://user:pw@host/score", "http://host/score#part", "http://host/\nscore",
    ],
)  # fmt: skip
def test_malformed_addresses(url: str) -> None:
    with pytest.raises(UserError) as caught:
        check_reward(RewardConfig(name=url), max_response_tokens=16)
    assert repr(url) in caught.value.what and "\n" not in str(caught.value)
    assert caught.value.where == "config: reward.name"


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid", "a" * 100])
def test_a_service_that_does_not_run(host: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://{host}:{unused.getsockname()[1]}/score"
        with pytest.raises(UserError, match=f"connect to the service {url}"):
            check_reward(RewardConfig(name=url), max_response_tokens=16)
