"""Who may ask an engine's HTTP door for what, and its limits for headers and bodies, over sockets.

Not covered: an engine behind it (tests/e2e/test_servers.py).
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
from aiohttp import ClientSession, web
from pydantic_core import to_json

from oblr_megatron.engine import http_door
from oblr_megatron.engine import http_messages as http
from oblr_megatron.engine.channel import Call, Channel, Reply
from oblr_megatron.engine.http_door import Door, Refused, check_access, make_runner
from oblr_megatron.engine.protocol import PromptRequest, SamplingRequest
from oblr_megatron.errors import UserError
from oblr_megatron.weights.manifest import TensorSpec

HEAD = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\n"
DEADLINE = 0.3  # of the tests, for headers and bodies
LIMIT = 1000  # bytes of a body to generate
BODY_BYTES = dict(http_door.BODY_BYTES)  # the real limits
KEY = "0123456789abcdef"


def status_of(path: str, key: str, **headers: str) -> int:
    """Of an answer to a request with these headers; 200 if it may pass."""
    try:
        check_access(path, headers, key)
    except Refused as error:
        return error.status
    return 200


@pytest.mark.parametrize("path", http.PATHS.values())
def test_every_path_but_health_asks_for_the_key(path: str) -> None:
    assert status_of(path, KEY, Authorization=f"Bearer {KEY}") == 200
    for given in ("", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"bearer  {KEY}", "Bearer ", "Bearer \udce9"):
        assert status_of(path, KEY, Authorization=given) == 401
    assert status_of(path, KEY) == 401
    assert status_of(http.HEALTH, KEY) == 200


OTHERS = "/collective_rpc /oblr/infox /oblr /oblr/info/ //oblr/info /oblr/sleep /oblr/abandon / /v1/completions"


@pytest.mark.parametrize("path", ["", *OTHERS.split()])
def test_other_paths_do_not_exist(path: str) -> None:
    assert status_of(path, KEY, Authorization=f"Bearer {KEY}") == 404
    assert status_of(path, "", Host="localhost:8000") == 404
    assert status_of(path, KEY) == 401
    with pytest.raises(Refused, match=r"rollout\.servers.*vllm serve"):
        check_access(path, {"Host": "localhost"}, "")


@pytest.mark.parametrize(
    ("headers", "let_in"),
    [
        ({"Host": "127.0.0.1:8000"}, True),
        ({"Host": "localhost"}, True),
        ({"Host": "[::1]:8000"}, True),
        ({"Host": "evil.example:8000"}, False),  # a name that somebody made resolve to 127.0.0.1
        ({}, False),
        ({"Host": "127.0.0.1:8000", "Origin": "http://evil.example"}, False),
        ({"Host": "localhost", "Origin": "null"}, False),
    ],
)
def test_without_a_key_a_browsers_requests_are_refused(headers: dict[str, str], let_in: bool) -> None:
    assert status_of(http.PATHS["info"], "", **headers) == (200 if let_in else 403)


def test_loopback() -> None:
    hosts = ["127.0.0.1", "127.9.9.9", "::1", "localhost", "10.0.0.5", "localhost.evil.example", "0.0.0.0", "host", ""]
    assert [host for host in hosts if http.is_loopback(host)] == hosts[:4]


HOLDING = http.Holding(holder="x", version=3)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "info": {},
    "sample": {
        "asked": [PromptRequest(7, (5, 9), SamplingRequest(2, 1.0, 8, 2**61, top_p=0.9, routes=True), 4, stop=(1,))],
        "holding": HOLDING,
    },
    "open_push": {"init_info": {"pid": 1, "boot_id": "b"}},
    "start_push": {"holding": HOLDING, "manifest": (TensorSpec("a", "float32", (2, 3)),)},
    "update_push": {"holding": HOLDING, "update_info": {"names": ["a"], "checksum": 2**64 - 1}},
    "finish_push": {"holding": HOLDING},
    "abort_push": {"holding": HOLDING, "reason": "r"},
    "digests": {},
    "speculation": {},
}


def test_a_call_over_http_has_the_arguments_of_one_over_the_socket() -> None:
    assert ARGUMENTS.keys() == http.PATHS.keys()
    for method, arguments in ARGUMENTS.items():
        model = http_door._arguments_of(method)
        received = dict(model.model_validate_json(to_json(arguments)))
        assert {name: received[name] for name in arguments} == arguments
        for wrong in (arguments | {"call": 1}, {**arguments, "self": 1}, {**arguments, "holding": {"run": "x"}}):
            with pytest.raises(ValueError, match=r"call|self|holding"):
                model.model_validate_json(to_json(wrong))


class App(Door):
    """Answers each request with the number of bytes it received; a body "wait" takes two deadlines."""

    def __init__(self) -> None:
        super().__init__(None, "")  # type: ignore[arg-type]  # without an engine
        self.sizes: list[int] = []
        self.gone = threading.Event()

    async def ask(self, path: str, body: bytes) -> bytes:
        self.sizes.append(len(body))
        if body == b"leave":
            try:
                await asyncio.Event().wait()
            finally:
                self.gone.set()
        if body == b"wait":
            await asyncio.sleep(2 * DEADLINE)
        return str(len(body)).encode()


def test_the_health_says_how_long_the_engine_has_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_door, "PING_SECONDS", 0.0)

    async def silences() -> tuple[float, float, float]:
        own, other = socket.socketpair()
        engine, peer = http_door.Engine(await Channel(own).for_loop()), await Channel(other).for_loop()
        tasks = [asyncio.create_task(one) for one in (engine.read(), engine.ping())]
        runner, listener = make_runner(Door(engine, KEY)), socket.create_server(("127.0.0.1", 0))
        await runner.setup()
        await web.SockSite(runner, listener).start()

        async def silent() -> float:
            async with session.get(f"http://127.0.0.1:{listener.getsockname()[1]}{http.HEALTH}") as answer:
                return http.Health.model_validate_json(await answer.read()).silent

        async with ClientSession() as session:
            ping: Call = await peer.receive()
            await asyncio.sleep(0.3)
            hung, answered = await silent(), time.monotonic()
            peer.send(Reply(number=ping.number))
            ping = await peer.receive()
            healthy, limit = await silent(), time.monotonic() - answered
            peer.writer.close()
            await asyncio.wait_for(asyncio.gather(*tasks), 30)  # both end with the engine
        await runner.cleanup()
        return hung, healthy, limit

    hung, healthy, limit = asyncio.run(silences())
    assert hung >= 0.3 and healthy < limit


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[App, int]]:
    """The application and its port."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_door, "HEADER_SECONDS", DEADLINE)
        patch.setattr(http_door, "BODY_SECONDS", DEADLINE)
        patch.setitem(http_door.BODY_BYTES, http.PATHS["sample"], LIMIT)
        app, loop, ports = App(), asyncio.new_event_loop(), []

        async def start() -> None:
            runner = make_runner(app)
            await runner.setup()
            listener = socket.create_server(("127.0.0.1", 0), backlog=512)
            await web.SockSite(runner, listener, backlog=512).start()
            ports.append(listener.getsockname()[1])

        loop.run_until_complete(start())
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        yield app, ports[0]
        loop.call_soon_threadsafe(loop.stop)
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


def post(port: int, body: bytes, path: str = http.PATHS["sample"]) -> bytes:
    head = HEAD % path.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    return answers(connect(port, head + body))


def test_a_port_that_was_taken_while_the_engine_started(app: App, port: int) -> None:
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        pytest.raises(UserError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use.*--host, --port"),
    ):
        asyncio.run(http_door._serve(Channel(ours), "127.0.0.1", port, ""))


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
    first = HEAD % http.PATHS["sample"].encode() + b"Content-Length: 2\r\n\r\nab"
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
        head = HEAD % http.PATHS["sample"].encode() + f"Content-Length: {announced}\r\n\r\n".encode()
        refusal = answers(connect(port, head))
        assert refusal.startswith(b"HTTP/1.1 413") and b"connection: close" in refusal.lower()
        assert str(LIMIT) in json.loads(refusal.rpartition(b"\r\n\r\n")[2])["error"]
    assert app.sizes == []


def test_bodies_up_to_the_limit_arrive_whole(app: App, port: int) -> None:
    for size in (0, 1, LIMIT):
        assert post(port, b"x" * size).endswith(b"\r\n\r\n%d" % size)
    chunks = b"".join(b"64\r\n" + b"x" * 100 + b"\r\n" for _ in range(LIMIT // 100)) + b"0\r\n\r\n"
    head = HEAD % http.PATHS["sample"].encode() + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert answers(connect(port, head + chunks)).endswith(b"\r\n\r\n%d" % LIMIT)
    assert app.sizes == [0, 1, LIMIT, LIMIT]


def test_a_chunked_body_over_the_limit_is_cut_off(app: App, port: int) -> None:
    connection = connect(port, HEAD % http.PATHS["sample"].encode() + b"Transfer-Encoding: chunked\r\n\r\n")
    try:
        for _ in range(10**6):
            connection.sendall(b"64\r\n" + b"x" * 100 + b"\r\n")
    except OSError:  # the server has closed it
        connection.close()
    else:
        pytest.fail("100 MB were taken")
    assert app.sizes == []


def test_a_body_that_does_not_arrive(app: App, port: int) -> None:
    head = HEAD % http.PATHS["sample"].encode() + b"Content-Length: 100\r\n\r\nx"
    assert answers(connect(port, head)).startswith(b"HTTP/1.1 408")
    assert app.sizes == []


def test_the_application_sees_that_a_client_has_gone(app: App, port: int) -> None:
    connection = connect(port, HEAD % http.PATHS["sample"].encode() + b"Content-Length: 5\r\n\r\nleave")
    connection.close()
    assert app.gone.wait(30)


def test_the_limits_hold_the_largest_messages() -> None:
    """Of Qwen3-235B-A22B: 94 layers of 128 experts; and of 4 prompts of 262,144 tokens, the most it can read."""
    experts = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(94) for expert in range(128)]
    holding = http.Holding(holder="0" * 16, version=10**6)
    manifest = tuple(TensorSpec(f"{name}.gate_proj.weight", "bfloat16", (1536, 4096)) for name in experts * 3)
    start = to_json({"holding": holding, "manifest": manifest})
    assert 4 * len(start) < BODY_BYTES[http.PATHS["start_push"]]
    ids = len(json.dumps([151_935] * 262_144))
    assert 4 * ids < BODY_BYTES[http.PATHS["sample"]]


def test_shapes_tell_models_apart() -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    assert http.shapes_digest(shapes) == http.shapes_digest(dict(reversed(shapes.items())))
    assert len({http.shapes_digest(one) for one in (shapes, {"a": (3, 2), "b": (4,)}, {"a": (2, 3)})}) == 3
