"""Closes connections to an API server on which a request's headers do not arrive. Imports uvicorn.

uvicorn waits for the headers of a request without a limit, so that a client can hold any number of connections open.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn import config
from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_SECONDS = 10.0
"""Most seconds until all headers of a request have arrived."""


class HeaderDeadline(asyncio.Protocol):
    """Adds a deadline for headers to a class of uvicorn's connections."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any  # the last request and its response; None before the first
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio: the first request may take `HEADER_SECONDS`."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio: the data may begin or complete the headers of a request."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the deadline between requests, unless it runs; end it when a request has begun.

        After a response uvicorn's own keep-alive limit applies until data arrive.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class TimedConnection(HeaderDeadline, AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # chosen at its import
    """uvicorn's connection with a deadline for headers."""


def install() -> None:
    """Use `TimedConnection` in every server that this process starts from now on.

    uvicorn takes the class from this table, and vLLM gives no other way to name one.
    """
    config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{TimedConnection.__name__}"
