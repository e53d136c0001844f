"""Rewards from a service: what is sent, what is tried again, and that nothing it does ends a run or takes longer.

The services are real ones of this machine (http_service.py). Not covered: TLS, proxies.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise

import pytest

from oblr_megatron.config import RewardConfig
from oblr_megatron.errors import UserError
from oblr_megatron.rewards.base import Reward, RewardResult
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


def test_a_request_holds_responses_answers_and_prompts() -> None:
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


def test_batches_are_of_whole_groups_and_values_in_order() -> None:
    result, asked = score(score_batch, batch_size=1, num_workers=2)
    assert result.rewards == LENGTHS
    assert sorted(one.body["responses"] for one in asked) == [["a", "bb"], ["ccc", ""]]


def test_any_text_arrives_as_it_is() -> None:
    responses = ['"\\\n\x00', "\u2028 \U0001f600", "\ud800 alone"]
    with serving(score_batch) as service, build(service.url) as reward:
        assert reward.score(*batch([("", responses)])).rewards == [4.0, 3.0, 7.0]
        assert service.asked[0].body["responses"] == responses


def test_as_many_requests_are_in_flight_as_workers_are_asked_for() -> None:
    barrier, lock, counts = threading.Barrier(2), threading.Lock(), [0, 0]  # now, most

    def meet(handler: Handler, asked: Asked) -> None:
        with lock:
            counts[0] += 1
            counts[1] = max(counts)
        barrier.wait(20)
        time.sleep(0.1)  # more than two at once would meet here
        with lock:
            counts[0] -= 1
        score_batch(handler, asked)

    with serving(meet) as service, build(service.url, batch_size=1, num_workers=2) as reward:
        result = reward.score(*batch([("", ["a"])] * 6))
    assert (result.rewards, result.faults) == ([1.0] * 6, {}), "each request waited for another one"
    assert counts[1] == 2


def test_a_batch_after_a_batch() -> None:
    with serving(score_batch) as service, build(service.url) as reward:
        assert [reward.score(*batch(GROUPS)).rewards for _ in range(3)] == [LENGTHS] * 3
        assert reward.score([], []).rewards == []
        reward.close()
        reward.close()


@pytest.mark.parametrize("trouble", [drop, cut, status(500), status(503), status(429, Retry_After="0")])
def test_what_may_pass_is_tried_again(trouble: Step) -> None:
    result, asked = score(trouble, trouble, score_batch, retries=2)
    assert (result.rewards, result.faults, len(asked)) == (LENGTHS, {}, 3)
    assert asked[0].body == asked[1].body == asked[2].body


def test_it_is_tried_again_so_often_and_no_more() -> None:
    result, asked = score(drop, drop, score_batch, retries=1)
    assert (result.rewards, result.failures, len(asked)) == ([0] * 4, 4, 2)
    assert result.error


def test_pauses_double() -> None:
    _, asked = score(status(500), retries=3)
    times = [one.at for one in asked]
    pauses = [after - before for before, after in pairwise(times)]
    assert all(pause >= 0.1 * 2**place for place, pause in enumerate(pauses)) and len(pauses) == 3


@pytest.mark.parametrize("named", ["seconds", "date"])
def test_retry_after_is_kept_to(named: str) -> None:
    later = "1" if named == "seconds" else format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    result, asked = score(status(429, Retry_After=later), score_batch)
    assert (result.rewards, len(asked)) == (LENGTHS, 2)
    assert asked[1].at - asked[0].at >= 0.9, "a date is in whole seconds"


def test_retry_after_beyond_the_deadline_fails_at_once() -> None:
    start = time.monotonic()
    result, asked = score(status(503, Retry_After="3600"), score_batch)
    assert (result.failures, result.timeouts, len(asked)) == (4, 0, 1)
    assert "status 503" in (result.error or "") and time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("trouble", "named"),
    [
        (status(401), 'status 401: \'{"error": "not now"}\''),
        (status(404), "status 404"),
        (status(422), "status 422"),
        (status(301, Location="/elsewhere"), "status 301"),
        (status(202), "status 202"),
        (text(b"garbage"), "something else than"),
        (text(b"\xff\xfe\x00"), "something else than"),
        (text(b"[" * 100_000), "something else than"),
        (text(b'["rewards"]'), "something else than"),
        (text(b'{"scores": [1, 1, 1, 1]}'), "something else than"),
        (text(b'{"rewards": 1}'), "no list of rewards for 4"),
        (text(b'{"rewards": {"a": 1, "b": 1, "c": 1, "d": 1}}'), "no list of rewards for 4"),
        (text(b'{"rewards": [1, 1, 1]}'), "3 rewards for 4"),
        (text(b'{"rewards": [' + b"1" * 5000 + b"]}"), "something else than"),
        (flood, "more than"),
    ],
)
def test_what_will_not_pass_fails_at_once(trouble: Step, named: str) -> None:
    result, asked = score(trouble, score_batch)
    assert (result.rewards, result.failures, result.timeouts, len(asked)) == ([0] * 4, 4, 0, 1)
    assert named in (result.error or "") and "http://127.0.0.1" in (result.error or "")


def test_a_value_that_is_no_number_fails_its_sample_alone() -> None:
    result, _ = score(text(b'{"rewards": [NaN, null, 1e999, 0.5]}'))
    assert (result.rewards, result.failures) == ([0, 0, 0, 0.5], 3)
    result, _ = score(text(b'{"rewards": ["1", true, [1], 1' + b"0" * 400 + b"]}"))
    assert (result.rewards, result.faults) == ([0, 1, 0, 0], {0: "failed", 2: "failed", 3: "failed"})


@pytest.mark.parametrize("trouble", [hang, drip])
def test_the_deadline_is_hard(trouble: Step) -> None:
    start = time.monotonic()
    result, _ = score(trouble, timeout_s=0.5)
    assert (result.rewards, result.failures, result.timeouts) == ([0] * 4, 0, 4)
    assert time.monotonic() - start < 10


def test_the_deadline_covers_the_retries() -> None:
    start = time.monotonic()
    result, asked = score(status(500), timeout_s=1.0, retries=1000)
    assert result.failures == 4 and 2 <= len(asked) < 20
    assert time.monotonic() - start < 10


def test_a_hanging_request_does_not_hold_up_the_others() -> None:
    def hang_once(handler: Handler, asked: Asked) -> None:
        (hang if "a" in asked.body["responses"] else score_batch)(handler, asked)

    result, _ = score(hang_once, batch_size=1, num_workers=2, timeout_s=1.0)
    assert (result.rewards, result.faults) == ([0, 0, 3, 0], {0: "late", 1: "late"})


def test_a_service_that_goes_away_ends_no_run() -> None:
    with serving(score_batch) as service:
        reward = build(service.url, retries=1)
        assert reward.score(*batch(GROUPS)).rewards == LENGTHS
    with reward:
        result = reward.score(*batch(GROUPS))
    assert result.failures == 4 and f"{service.url} cannot be asked" in (result.error or "")


def test_a_token_goes_with_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret\n")
    _, asked = score(score_batch, batch_size=1, api_key_env="JUDGE_KEY")
    assert [one.token for one in asked] == ["Bearer s3cret"] * 2


@pytest.mark.parametrize("value", [None, "", "  ", "two\nlines", "schlüssel"])
def test_a_token_that_cannot_be_sent_is_a_users_error(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with serving(score_batch) as service, pytest.raises(UserError, match="JUDGE_KEY") as caught:
        build(service.url, api_key_env="JUDGE_KEY")
    assert "two" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///score",
        "https://:80",
        "http://host:notaport/",
        "http://host:99999/",
        "http://[::1/",
        "http://user:pw@host/score",
        "http://host/score#part",
        "http://host/\nscore",
    ],
)
def test_what_is_no_address_is_a_users_error(url: str) -> None:
    with pytest.raises(UserError, match="is not the address of a service") as caught:
        check_reward(RewardConfig(name=url), max_response_tokens=16)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid", "a" * 100])
def test_a_service_that_is_not_there_is_a_users_error(host: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://{host}:{unused.getsockname()[1]}/score"
        with pytest.raises(UserError, match="cannot be reached"):
            check_reward(RewardConfig(name=url), max_response_tokens=16)
