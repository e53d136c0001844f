"""An event loop in a thread, so that a rank can call many servers concurrently while it gathers weights."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp
from aiohttp import AddrInfoType

Value = TypeVar("Value")

CLOSE_SECONDS = 5.0
CONNECT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 2.0
"""Close idle connections before the server does (vLLM, uvicorn: after 5 s), which could break a request in flight."""
SILENCE_SECONDS = 30
"""A connection ends when the other machine has acknowledged nothing for so long. A machine that went away, or a router
that forgot the connection, sends no end of it: a request would wait for its whole deadline."""


class HttpLoop:
    """Runs coroutines for a thread without an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def submit(self, call: Coroutine[Any, Any, Value]) -> Future[Value]:
        """Start a coroutine; the future can be awaited or cancelled."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def run(self, call: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine, which must have its own deadline, to its end; an interrupt cancels it."""
        future = self.submit(call)
        try:
            return future.result()
        except BaseException:  # an interrupt too must cancel the request; it is raised again
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel running coroutines and end the thread. Further calls do nothing."""
        if self.closed:
            return
        self.submit(_cancel_all()).result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)


def open_session() -> aiohttp.ClientSession:
    """A client session without a total timeout. Call it in the loop that uses the session."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, socket_factory=_socket_that_notices_silence
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
    )


def _socket_that_notices_silence(address: AddrInfoType) -> socket.socket:
    """A socket for the connector; the kernel asks the other machine every SILENCE_SECONDS / 6."""
    one = socket.socket(*address[:3])
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        one.setsockopt(socket.IPPROTO_TCP, option, SILENCE_SECONDS // 6)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_SECONDS)
    return one


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
