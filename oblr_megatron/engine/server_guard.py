"""ASGI middleware that guards every request to an API server with a key and a short list of paths.

vLLM's own key guards only some path prefixes, and vLLM serves other paths that can run any method in the engine. This
middleware runs first, asks for the key on every path except /health, and refuses every path that is not listed here.
Without a key (`engine.serve_command` allows that on loopback only) it refuses requests that a web page may have caused:
those with an Origin header, or with a host name that is not this machine's. It reads the body of every request
that passes. A body must have a limited size and arrive within `BODY_SECONDS`.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from ipaddress import ip_address
from typing import Any

from oblr_megatron.engine import http_messages as http

KEY_VARIABLE = "OBLR_SERVER_KEY"
"""Environment variable with the key, set by `engine.serve_command` for the server process."""
HEALTH = "/health"
OPEN_PATHS = frozenset({HEALTH})
OURS = {http.INFO, http.GENERATE, http.DIGESTS, http.SPECULATION, *http.PUSH}
PATHS = OPEN_PATHS | OURS | {"/metrics", "/version", "/v1/models"}

BODY_BYTES = {
    http.GENERATE: 2**24,  # 4 prompts (`rollout.balance`) of 500,000 token ids, 8 bytes each
    http.PUSH_START: 2**26,  # 100,000 tensors, 600 bytes each; Qwen3-235B-A22B has 36,000 of 100 bytes
    http.PUSH_UPDATE: 2**26,  # a bucket lists its tensors again
}
OTHER_BYTES = 2**20
"""Most bytes of other bodies, which hold a few fields or nothing."""
BODY_SECONDS = 60.0
"""Most seconds until a whole body has arrived."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """The middleware in the form that vLLM's --middleware option takes."""

    def __init__(self, app: App) -> None:
        self._app, self._key = app, os.environ.get(KEY_VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        from starlette.responses import JSONResponse

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = refuse(scope, self._key)
        if refusal is None:
            body = await read_body(receive, BODY_BYTES.get(scope["path"], OTHER_BYTES))
            if isinstance(body, bytes):
                await self._app(scope, _received(body, receive), send)
                return
            refusal = body
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif refusal is not None:
            status, reason = refusal
            headers = {"connection": "close"}  # the rest of a refused request is not read
            await JSONResponse({"error": reason}, status, headers)(scope, receive, send)


async def read_body(receive: Receive, most: int) -> bytes | tuple[int, str] | None:
    """A request's body of at most `most` bytes; or status and reason of a refusal; or None if the client has gone."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > most:
                    return too_large(most)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        return 408, f"the body did not arrive within {BODY_SECONDS:g} s"


def too_large(most: int) -> tuple[int, str]:
    """Status and reason of the refusal of a body with more than `most` bytes."""
    return 413, f"the body has more than {most} bytes"


def _received(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the whole body first, and then the later messages: the client's end."""
    first: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return first.pop() if first else await receive()

    return again


def refuse(scope: Scope, key: str) -> tuple[int, str] | None:
    """Status and reason of a refusal; None lets the request pass. The key is empty for none."""
    headers = {name.lower(): value for name, value in scope.get("headers", ())}
    path = scope["path"]
    if path not in OPEN_PATHS:
        if key and not hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + key.encode()):
            return 401, "the API key is missing or wrong"
        if not key and (b"origin" in headers or not is_loopback(_host(headers.get(b"host", b"").decode("latin-1")))):
            return 403, "without an API key this server answers only programs on its own machine"
    if scope["type"] != "http" or path not in PATHS:
        return 403, f"{path} is not served here"
    most = BODY_BYTES.get(path, OTHER_BYTES)
    announced = headers.get(b"content-length", b"0")
    if not announced.isdigit() or len(announced) > len(str(most)) or int(announced) > most:
        return too_large(most)
    return None


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _host(header: str) -> str:
    """The host name in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
