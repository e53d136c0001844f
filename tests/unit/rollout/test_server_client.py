"""What a failed request to a server means: a retry, or the loss of the server. No server: the session is a stand-in.

Not covered: real servers that die or hang (tests/e2e/test_servers.py).
"""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import aiohttp
import pytest

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


@pytest.mark.parametrize("status", [http.REFUSED, http.INVALID, http.FAILED])
def test_an_answer_that_is_an_error_names_its_server_once(status: int) -> None:
    server = VllmServer(URL, "")
    with pytest.raises(RunError) as caught:
        server._raise(status, b'{"error": "out of memory"}', "push 3")
    server.lose(str(caught.value))
    said = reasons([server, VllmServer("http://127.0.0.1:10", "")])
    assert said.count(URL) == said.count("push 3") == said.count("out of memory") == 1
