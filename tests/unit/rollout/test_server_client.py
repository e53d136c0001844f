"""What a failed request to a server means: a retry, or the loss of the server. No server: the session is a stand-in.

Not covered: real servers that die or hang (tests/e2e/test_servers.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf, isnan, nan
from types import SimpleNamespace
from typing import Any, NoReturn

import aiohttp
import pytest
from pydantic_core import to_json

from oblr_megatron.engine import http_messages as http
from oblr_megatron.engine.http_messages import Holding
from oblr_megatron.engine.protocol import PromptRequest, SamplingRequest
from oblr_megatron.errors import RunError
from oblr_megatron.rollout import server_client
from oblr_megatron.rollout.server_client import RETRIES, DroppedError, ServerLostError, VllmServer, reasons

URL = "http://127.0.0.1:9"
REQUEST = SamplingRequest(group_size=1, temperature=1.0, max_tokens=4, seed=0)
ASKED = (PromptRequest(0, (5,), REQUEST, position=0),)


class Session:
    """Fails every request."""

    def __init__(self, error: Exception) -> None:
        self.error, self.requests = error, 0

    def request(self, *_: object, **__: object) -> NoReturn:
        self.requests += 1
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind", "requests"),
    [
        (aiohttp.ConnectionTimeoutError(f"Connection timeout to host {URL}"), DroppedError, RETRIES + 1),
        (aiohttp.ServerDisconnectedError(), DroppedError, RETRIES + 1),
        (ConnectionRefusedError(), DroppedError, RETRIES + 1),
        (TimeoutError(), ServerLostError, 1),
    ],
)
def test_a_connection_that_fails_is_tried_again_and_a_deadline_is_not(
    error: Exception, kind: type[Exception], requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_client, "BACKOFF_SECONDS", 0.0)
    server: Any = VllmServer(URL, "")
    server._session = Session(error)
    with pytest.raises(ServerLostError) as caught:
        asyncio.run(server.sample(ASKED, Holding(), 60.0))
    assert type(caught.value) is kind and server._session.requests == requests
    assert str(caught.value).count("127.0.0.1:9") == 1


class Proxy:
    """Gives these answers, the last one for ever."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers, self.requests = answers, 0

    @asynccontextmanager
    async def request(self, *_: object, **__: object) -> AsyncIterator[Any]:
        status, text = self.answers[min(self.requests, len(self.answers) - 1)]
        self.requests += 1
        yield SimpleNamespace(status=status, read=lambda: asyncio.sleep(0, text.encode()))


@pytest.mark.parametrize("status", [408, 429])
def test_a_request_that_did_not_get_through_is_sent_again(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "BACKOFF_SECONDS", 0.0)
    response = http.Response(ids=(1,), logprobs=(0.0,), text="", finish_reason="stop")
    good = http.SampleAnswer(holding=Holding(), groups=[[response]])
    server: Any = VllmServer(URL, "")
    server._session = Proxy((status, "wait"), (200, good.model_dump_json()))
    (group,) = asyncio.run(server.sample(ASKED, Holding(), 60.0))
    assert [one.response_ids for one in group] == [(1,)] and server._session.requests == 2


def test_log_probs_that_are_no_numbers_arrive() -> None:
    """The trainer leaves such a sample out; an invalid answer would end the run, and its resume as well."""
    response = http.Response(ids=(1, 2, 3), logprobs=(nan, -inf, -0.5), text="", finish_reason="stop")
    server: Any = VllmServer(URL, "")
    server._session = Proxy((200, to_json(http.SampleAnswer(holding=Holding(), groups=[[response]])).decode()))
    ((sample,),) = asyncio.run(server.sample(ASKED, Holding(), 60.0))
    assert isnan(sample.logprobs[0]) and sample.logprobs[1:] == (-inf, -0.5)


@pytest.mark.parametrize("answer", [(404, "no such page"), (200, "<html>"), (403, '{"detail": "no"}')])
def test_an_answer_that_is_not_ours_is_a_loss_once_the_server_has_answered(answer: tuple[int, str]) -> None:
    """A proxy gives it while its server restarts. From the first question on, it is another program's."""
    server: Any = VllmServer(URL, "")
    server._session = Proxy(answer)
    with pytest.raises(RunError) as caught:
        asyncio.run(server.sample(ASKED, Holding(), 60.0))
    assert not isinstance(caught.value, ServerLostError)
    server.instance = "one"
    with pytest.raises(ServerLostError):
        asyncio.run(server.sample(ASKED, Holding(), 60.0))


HEALTHY, HUNG = ((200, http.Health(silent=silent).model_dump_json()) for silent in (899.0, 901.0))


def lost(*answers: tuple[int, str], silence_s: float) -> tuple[str, int]:
    """Why a watched server is lost, and the number of requests until then."""
    server: Any = VllmServer(URL, "", silence_s=silence_s)
    server._session = Proxy(*answers)
    with pytest.raises(ServerLostError) as caught:
        asyncio.run(server.watch())
    assert str(caught.value).count(URL) == 1
    return str(caught.value), server._session.requests


def test_a_single_answer_to_the_watch_that_says_nothing_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "WATCH_SECONDS", 0.0)
    answers = [HEALTHY, (404, "no such page"), (429, "slowly"), (200, "<html>"), (401, "{}"), (503, ""), HEALTHY, HUNG]
    reason, requests = lost(*answers, silence_s=600.0)
    assert reason == f"the engine of server {URL} has not answered for 901 s" and requests == len(answers)


@pytest.mark.parametrize("answer", [(404, "no such page"), (200, "no such page"), (502, "no such page")])
def test_answers_that_say_nothing_are_silence(answer: tuple[int, str]) -> None:
    reason, _ = lost(HEALTHY, answer, silence_s=0.2)
    assert "no such page" in reason and reason.endswith("no sign of life for 0.2 s")


@pytest.mark.parametrize("status", [http.REFUSED, http.INVALID, http.FAILED])
def test_an_answer_that_is_an_error_names_its_server_once(status: int, caplog: pytest.LogCaptureFixture) -> None:
    server = VllmServer(URL, "")
    with pytest.raises(RunError) as caught:
        server._raise(status, b'{"error": "out of memory"}', "push 3")
    server.lose(str(caught.value))
    said = reasons([server, VllmServer("http://127.0.0.1:10", "")])
    assert said.count(URL) == said.count("push 3") == said.count("out of memory") == 1
    server.lose(str(caught.value))
    assert caplog.text.count(f"{said}; it gets no prompts meanwhile") == 1 == caplog.text.count(URL), "a loss is logged"
