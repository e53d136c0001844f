"""The HTTP door of an engine: what `oblr-megatron serve` runs in front of the engine's process. Imports no vllm.

A path is a method of `EngineServer`, and a request is a `Call`, as a rank makes it over its socket; nothing else is
served. /health says how long the engine has not answered. Anyone who may call can replace the weights, so every other
path asks for the key. Without a key (`engine.serve_command` allows that on loopback only) the door refuses requests
that a web page may have caused: those with an Origin header, or with a host name that is not this machine's. A body
must have a limited size and arrive within `BODY_SECONDS`, the headers before it within `HEADER_SECONDS`.
"""

from __future__ import annotations

import asyncio
import hmac
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from inspect import signature
from itertools import count
from typing import Any, get_type_hints

from aiohttp import web
from pydantic import create_model
from pydantic_core import to_json

from oblr_megatron.engine import http_messages as http
from oblr_megatron.engine.channel import AsyncChannel, Call, Channel, PeerGone, Reply
from oblr_megatron.engine.core import EngineServer
from oblr_megatron.engine.handle import how_it_ended, kill, launch
from oblr_megatron.engine.protocol import EngineSpec, PromptRequest
from oblr_megatron.engine.state import InvalidRequest, Refusal
from oblr_megatron.errors import EXIT_OK, DamagedError, RunError, WeightError
from oblr_megatron.types import Sample

STATUSES: tuple[tuple[tuple[type[Exception], ...], int], ...] = (
    ((Refusal, WeightError), http.REFUSED),
    ((ValueError, InvalidRequest), http.INVALID),
    ((RunError,), http.FAILED),
)
"""Types of errors and their HTTP status; the first match counts."""
DEAD = "its engine has died"
PURPOSE = (
    "this server samples for a trainer (rollout.servers); for completions and chat start `vllm serve`, on CPUs "
    "`python -m vllm.entrypoints.openai.api_server --model`"
)

BODY_BYTES = {
    http.PATHS["sample"]: 2**24,  # 4 prompts (`rollout.balance`) of 500,000 token ids, 8 bytes each
    http.PATHS["start_push"]: 2**26,  # 100,000 tensors, 600 bytes each; Qwen3-235B-A22B has 36,000 of 120 bytes
    http.PATHS["update_push"]: 2**26,  # a bucket lists its tensors again
}
OTHER_BYTES = 2**20
"""Most bytes of other bodies, which hold a few fields or nothing."""
BODY_SECONDS = 60.0
"""Most seconds until a whole body has arrived."""
HEADER_SECONDS = 10.0
"""Most seconds until the headers of a connection's next request have arrived."""
PING_SECONDS = 1.0
"""Interval of the pings of the engine."""
LINGER_SECONDS = 1.0
"""Seconds in which the rest of a refused request is read, so that its client can read the refusal."""


class Refused(Exception):
    """A request is answered with this HTTP status and reason before the engine hears of it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Engine:
    """Calls of an engine process from an event loop, any number at a time."""

    def __init__(self, channel: AsyncChannel) -> None:
        self._channel = channel
        self._calls, self._prompts = count(1), count()  # numbers
        self._waiting: dict[int, asyncio.Queue[Reply]] = {}
        self._pinged: float | None = None  # when the ping was sent that is not answered yet
        self._ended = False

    async def read(self) -> None:
        """Hand the engine's replies to the calls that wait for them; returns when the engine has ended."""
        with suppress(PeerGone):
            while True:
                reply: Reply = await self._channel.receive()
                if reply.number in self._waiting:
                    self._waiting[reply.number].put_nowait(reply)
        self._ended = True
        for replies in self._waiting.values():
            replies.put_nowait(Reply(error=DEAD))

    async def ping(self) -> None:
        """Call the engine from time to time, until it has ended: it answers between two steps."""
        with suppress(RunError):
            while True:
                self._pinged = time.monotonic()
                await self.call("info")
                self._pinged = None
                await asyncio.sleep(PING_SECONDS)

    @property
    def silent(self) -> float:
        """Seconds for which the engine has left a ping without an answer."""
        return 0.0 if self._pinged is None else time.monotonic() - self._pinged

    async def replies(self, method: str, **arguments: Any) -> AsyncIterator[Any]:
        """The values of all replies to a call. Raises the type of error that the engine has raised."""
        if self._ended:
            raise RunError(DEAD)
        number = next(self._calls)
        waiting = self._waiting[number] = asyncio.Queue()
        self._channel.send(Call(method, arguments, number))
        try:
            more = True
            while more:
                reply = await waiting.get()
                if reply.error is not None:
                    raise reply.kind(reply.error)
                yield reply.value
                more = reply.more
        finally:
            del self._waiting[number]

    async def call(self, method: str, **arguments: Any) -> Any:
        """The value of the only reply to a call."""
        return [value async for value in self.replies(method, **arguments)][-1]

    async def sample(self, asked: Sequence[PromptRequest], holding: http.Holding, **options: Any) -> http.SampleAnswer:
        """See `EngineServer.sample`. A client that goes away abandons its prompts."""
        asked = [replace(one, number=next(self._prompts)) for one in asked]
        groups: dict[int, list[Sample]] = {}
        try:
            async for complete in self.replies("sample", asked=asked, holding=holding, **options):
                groups |= dict(complete)
        finally:
            if left := [one.number for one in asked if one.number not in groups]:
                self._channel.send(Call("abandon", {"numbers": left}))
        return http.SampleAnswer.of(holding, (groups[one.number] for one in asked))


class Door:
    """Answers HTTP requests with an engine."""

    def __init__(self, engine: Engine, key: str) -> None:
        """The key is empty for none."""
        self._engine, self._key = engine, key

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Check a request, and pass it on. It is cancelled when the client disconnects."""
        try:
            check_access(request.path, request.headers, self._key)
            body = await read_body(request)
            if request.path == http.HEALTH:
                return _json(to_json(http.Health(silent=self._engine.silent)))
            return _json(await self.ask(request.path, body))
        except (Refused, ValueError, RunError) as error:
            return error_answer(error)

    async def ask(self, path: str, body: bytes) -> bytes:
        """The answer of the engine as JSON."""
        method = next(method for method, served in http.PATHS.items() if served == path)
        arguments = dict(_arguments_of(method).model_validate_json(body or b"{}"))
        if method == "sample":
            return to_json(await self._engine.sample(**arguments))
        return to_json(await self._engine.call(method, **arguments))


@cache
def _arguments_of(method: str) -> type[http.Message]:
    """A model of the arguments of an engine's method; another argument is an error."""
    function = getattr(EngineServer, method)
    hints, parameters = get_type_hints(function), signature(function).parameters
    fields: dict[str, Any] = {
        name: (hints[name], ... if one.default is one.empty else one.default)
        for name, one in parameters.items()
        if name not in ("self", "call")
    }
    return create_model(method, __base__=http.Message, **fields)


def run(spec: EngineSpec, host: str, port: int, key: str) -> int:
    """Start the engine, and serve it until SIGINT, SIGTERM or its end; returns the exit status.

    Raises:
        UserError: the port was taken while the engine started.
        RunError: the engine did not start, or has died.
    """
    channel, process = launch(spec)
    try:
        reply: Reply = channel.receive(alive=lambda: process.poll() is None)
        if reply.error is not None:
            raise RunError(f"the engine did not start: {reply.error}")
        asyncio.run(_serve(channel, host, port, key))
    except PeerGone:
        raise RunError(f"the engine {how_it_ended(process)}") from None
    finally:
        kill(process)
    return EXIT_OK


async def _serve(channel: Channel, host: str, port: int, key: str) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    engine = Engine(await channel.for_loop())
    ends = [asyncio.create_task(engine.read()), asyncio.create_task(stop.wait())]
    pings = asyncio.create_task(engine.ping())
    runner = make_runner(Door(engine, key))
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except OSError as error:  # another program has come first: engines take minutes to start
        raise http.cannot_listen(host, port, error) from None
    print(f"listening on http://{host}:{port}", flush=True)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    pings.cancel()
    await runner.cleanup()
    if not stop.is_set():
        raise PeerGone("the engine has ended")


def make_runner(door: Door) -> web.ServerRunner:
    """aiohttp's server with our limits. Its timer of idle connections runs until a request's headers are complete."""
    options: dict[str, Any] = {"keepalive_timeout": HEADER_SECONDS, "lingering_time": LINGER_SECONDS}
    server = web.Server(door.answer, handler_cancellation=True, access_log=None, **options)
    return web.ServerRunner(server, handle_signals=False, shutdown_timeout=LINGER_SECONDS)


def check_access(path: str, headers: Mapping[str, str], key: str) -> None:
    """Refuse a request without the key, or for a path that is not served. An empty key admits all local ones."""
    if path == http.HEALTH:
        return
    given = headers.get("Authorization", "").encode(errors="surrogateescape")
    if key and not hmac.compare_digest(given, b"Bearer " + key.encode()):
        raise Refused(401, "the API key is missing or wrong")
    if not key and ("Origin" in headers or not http.is_loopback(_host(headers.get("Host", "")))):
        raise Refused(403, "without an API key this server answers only programs on its own machine")
    if path not in http.PATHS.values():
        raise Refused(404, f"{path} is not served here: {PURPOSE}")


async def read_body(request: web.BaseRequest) -> bytes:
    """The whole body of a request. Raises `Refused` if it has too many bytes, or comes too late."""
    most, body = BODY_BYTES.get(request.path, OTHER_BYTES), bytearray()
    too_large = Refused(413, f"the body has more than {most} bytes")
    if (request.content_length or 0) > most:
        raise too_large
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.content.iter_any():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    return bytes(body)


def _host(header: str) -> str:
    """The host name in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _json(content: bytes) -> web.Response:
    return web.Response(body=content, content_type="application/json")


def error_answer(error: Exception) -> web.Response:
    """The answer to a request that was refused, is invalid, or has failed."""
    kind = http.DAMAGED if isinstance(error, DamagedError) else ""
    answer = _json(to_json({"error": str(error), "kind": kind}))
    if isinstance(error, Refused):
        answer.set_status(error.status)
        answer.force_close()  # the rest of the request is not read
    else:
        answer.set_status(next(status for kinds, status in STATUSES if isinstance(error, kinds)))
    return answer
