"""Limits of an API server for headers and bodies, on a real uvicorn with the real guard, over sockets.

Not covered: vLLM's application behind them (tests/e2e/test_servers.py).
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from uvicorn import config as uvicorn_config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from oblr_megatron.engine import http_messages as http
from oblr_megatron.engine import server_connection, server_guard
from oblr_megatron.engine.server_connection import HeaderDeadline, TimedConnection
from oblr_megatron.engine.server_guard import Guard

HEAD = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\n"
DEADLINE = 0.3  # of the tests, for headers and bodies
LIMIT = 1000  # bytes of a body to generate
BODY_BYTES = dict(server_guard.BODY_BYTES)  # the real limits


class App:
    """Answers each request with the number of bytes it received; a body "wait" takes two deadlines."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.gone = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        body = (await receive())["body"]
        self.sizes.append(len(body))
        if body == b"leave":
            assert (await receive())["type"] == "http.disconnect"
            self.gone.set()
            return
        if body == b"wait":
            await asyncio.sleep(2 * DEADLINE)
        answer = str(len(body)).encode()
        headers = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


class OnHttptools(HeaderDeadline, HttpToolsProtocol):
    """The deadline on one of uvicorn's parsers."""


class OnH11(HeaderDeadline, H11Protocol):
    """The deadline on the other one, which uvicorn uses where httptools is not installed."""


@pytest.fixture(scope="module", params=[OnHttptools, OnH11])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[App, int]]:
    """The application and its port, with either of uvicorn's two parsers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_connection, "HEADER_SECONDS", DEADLINE)
        patch.setattr(server_guard, "BODY_SECONDS", DEADLINE)
        patch.setitem(server_guard.BODY_BYTES, http.GENERATE, LIMIT)
        app = App()
        server = uvicorn.Server(uvicorn.Config(Guard(app), http=request.param, log_config=None, lifespan="off"))
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield app, listener.getsockname()[1]
        server.should_exit = True
        thread.join(30)


@pytest.fixture
def app(served: tuple[App, int]) -> App:
    served[0].sizes.clear()
    return served[0]


@pytest.fixture
def port(served: tuple[App, int]) -> int:
    return served[1]


def connect(port: int, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(sent)
    return connection


def answers(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:  # it closed with unread bytes on its side
        pass
    finally:
        connection.close()
    return b"".join(parts)


def answer(connection: socket.socket) -> bytes:
    """One answer on a connection that goes on; the tests' bodies are one digit."""
    received = b""
    while not received.partition(b"\r\n\r\n")[2]:
        received += connection.recv(65536)
    return received


def post(port: int, body: bytes, path: str = http.GENERATE) -> bytes:
    head = HEAD % path.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    return answers(connect(port, head + body))


def test_half_sent_requests_are_closed(app: App, port: int) -> None:
    half = [connect(port, HEAD % b"/health" + b"X: y") for _ in range(300)]
    assert post(port, b"x" * 10).endswith(b"10"), "others are served meanwhile"
    assert [answers(connection) for connection in half] == [b""] * 300


def test_headers_that_trickle_are_cut_off(port: int) -> None:
    connection = connect(port, b"")
    end = time.monotonic() + 30
    with pytest.raises(OSError):  # reset or broken pipe
        while time.monotonic() < end:
            connection.sendall(b"G")
            time.sleep(DEADLINE / 10)
    connection.close()


def test_a_connection_without_a_byte_is_closed(port: int) -> None:
    assert answers(connect(port, b"")) == b""


def test_a_half_sent_second_request_is_closed(port: int) -> None:
    first = HEAD % http.GENERATE.encode() + b"Content-Length: 2\r\n\r\nab"
    connection = connect(port, first)
    assert answer(connection).endswith(b"2")
    connection.sendall(first)
    assert answer(connection).endswith(b"2"), "connections are kept for further requests"
    connection.sendall(HEAD % b"/health")
    assert answers(connection) == b""


def test_a_long_answer_is_not_cut_off(app: App, port: int) -> None:
    assert post(port, b"wait").endswith(b"\r\n\r\n4")


def test_a_huge_content_length_is_refused_at_once(app: App, port: int) -> None:
    for announced in (str(LIMIT + 1), str(100 * 10**9), "9" * 18):
        head = HEAD % http.GENERATE.encode() + f"Content-Length: {announced}\r\n\r\n".encode()
        refusal = answers(connect(port, head))
        assert refusal.startswith(b"HTTP/1.1 413") and b"connection: close" in refusal
        assert str(LIMIT) in json.loads(refusal.rpartition(b"\r\n\r\n")[2])["error"]
    assert app.sizes == []


def test_bodies_up_to_the_limit_arrive_whole(app: App, port: int) -> None:
    for size in (0, 1, LIMIT):
        assert post(port, b"x" * size).endswith(b"\r\n\r\n%d" % size)
    chunks = b"".join(b"64\r\n" + b"x" * 100 + b"\r\n" for _ in range(LIMIT // 100)) + b"0\r\n\r\n"
    head = HEAD % http.GENERATE.encode() + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert answers(connect(port, head + chunks)).endswith(b"\r\n\r\n%d" % LIMIT)
    assert app.sizes == [0, 1, LIMIT, LIMIT]


def test_a_chunked_body_over_the_limit_is_cut_off(app: App, port: int) -> None:
    connection = connect(port, HEAD % http.GENERATE.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
    try:
        for _ in range(10**6):
            connection.sendall(b"64\r\n" + b"x" * 100 + b"\r\n")
    except OSError:  # the server has closed it
        connection.close()
    else:
        pytest.fail("100 MB were taken")
    assert app.sizes == []


def test_a_body_that_does_not_arrive(app: App, port: int) -> None:
    head = HEAD % http.GENERATE.encode() + b"Content-Length: 100\r\n\r\nx"
    assert answers(connect(port, head)).startswith(b"HTTP/1.1 408")
    assert app.sizes == []


def test_the_application_sees_that_a_client_has_gone(app: App, port: int) -> None:
    connection = connect(port, HEAD % http.GENERATE.encode() + b"Content-Length: 5\r\n\r\nleave")
    connection.close()
    assert app.gone.wait(30)


def test_every_server_of_the_process_has_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_config, "HTTP_PROTOCOLS", dict(uvicorn_config.HTTP_PROTOCOLS))
    server_connection.install()
    config = uvicorn.Config(App())
    config.load()
    assert config.http_protocol_class is TimedConnection


def test_the_limits_hold_the_largest_messages() -> None:
    """Of Qwen3-235B-A22B: 94 layers of 128 experts; and of 4 prompts of 262,144 tokens, the most it can read."""
    experts = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(94) for expert in range(128)]
    holding = http.Holding(holder="0" * 16, version=10**6)
    manifest = [(f"{name}.gate_proj.weight", "bfloat16", (1536, 4096)) for name in experts * 3]
    start = http.StartBody(holding=holding, manifest=manifest).model_dump_json()
    assert 4 * len(start) < BODY_BYTES[http.PUSH_START]
    ids = len(json.dumps([151_935] * 262_144))
    assert 4 * ids < BODY_BYTES[http.GENERATE]
