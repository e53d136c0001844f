"""An event loop in a thread of its own, so that a rank can speak to many servers at once, and gather meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp

Value = TypeVar("Value")

CLOSE_SECONDS = 5.0
CONNECT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 2.0
"""Idle connections are closed before the server closes them (vLLM, uvicorn: after 5 s), which a request might cross."""


class HttpLoop:
    """Runs coroutines for a thread that has no loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def submit(self, call: Coroutine[Any, Any, Value]) -> Future[Value]:
        """Start a coroutine; its result can be waited for, or the whole cancelled."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def run(self, call: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine to its end, which must have a deadline of its own; an interrupt here cancels it."""
        future = self.submit(call)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what is running, and end the thread; may be called again."""
        if self.closed:
            return
        self.submit(_cancel_all()).result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)


def open_session() -> aiohttp.ClientSession:
    """Connections of one client, without a deadline of their own; called in the loop that they are used in."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
    )


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
