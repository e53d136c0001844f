"""Messages between an engine process and its parent: a length and a pickle, over an inherited socket pair.

No wait is unbounded: a receiver checks every `CHECK_SECONDS` that its peer is alive. Pickle is safe here, because the
only writer at the other end is the process that this one started, or was started by. `AsyncChannel` is the same for an
event loop.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oblr_megatron.errors import RunError

CHECK_SECONDS = 0.2
READ_AHEAD = 2**24
"""Bytes that an event loop reads before somebody asks for them."""
_HEADER = struct.Struct(">Q")


class PeerGone(ConnectionError):
    """The process at the other end has closed its socket or has ended."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an engine method. Example: Call("sleep", {"level": 1}, number=12)"""

    method: str
    arguments: dict[str, Any]
    number: int = 0  # names the call in its replies


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer, or a part of it: a value or an error. Example: Reply(error="weights are incomplete")"""

    value: Any = None
    more: bool = False  # further replies to the same call follow
    error: str | None = None
    kind: type[RunError] = RunError  # type of the error
    number: int = 0  # of the call


class Channel:
    """One end of the socket pair.

    No call changes the socket's mode, because all its duplicates share it: a deadline of one thread's call would end
    the wait of another thread.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, message: object, deadline: float | None = None) -> None:
        """Write a picklable message, until the deadline: a value of time.monotonic(); None waits without limit.

        Raises:
            TimeoutError: the peer did not read in time.
            PeerGone: the peer has ended.
        """
        rest = memoryview(_packed(message))
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                seconds = None if deadline is None else max(1e-3, deadline - time.monotonic())
                if not self._wait(select.POLLOUT, seconds):
                    raise TimeoutError("the other end does not read") from None
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerGone("the other end is closed") from error

    def ready(self) -> bool:
        """Whether a message, or the end of the stream, can be read."""
        return self._wait(select.POLLIN, 0)

    def writer(self) -> Channel:
        """A second channel on this socket, for a thread that only sends. Each channel is closed by itself."""
        return Channel(self._socket.dup())

    def receive(self, deadline: float | None = None, alive: Callable[[], bool] | None = None) -> Any:
        """Read the next message, with a deadline as for `send`. `alive` is asked every CHECK_SECONDS.

        Raises:
            TimeoutError: no complete message arrived in time.
            PeerGone: the peer closed its end or has ended.
        """
        (size,) = _HEADER.unpack(self._read(_HEADER.size, deadline, alive))
        return pickle.loads(self._read(size, deadline, alive))

    async def for_loop(self) -> AsyncChannel:
        """This end, for the running event loop. The channel itself must not be used any more."""
        self._socket.setblocking(False)
        return AsyncChannel(*await asyncio.open_unix_connection(sock=self._socket, limit=READ_AHEAD))

    def close(self) -> None:
        """Close this end; the peer sees it at its next read."""
        self._socket.close()

    def _read(self, size: int, deadline: float | None, alive: Callable[[], bool] | None) -> bytearray:
        buffer = bytearray(size)
        view, filled = memoryview(buffer), 0
        while filled < size:
            try:  # reads what arrived in time, even after the deadline
                count = self._socket.recv_into(view[filled:], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if self._wait(select.POLLIN, None if deadline is None and alive is None else CHECK_SECONDS):
                    continue
                if alive is not None and not alive():
                    raise PeerGone("the other end is not alive") from None
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError("no message came in time") from None
                continue
            except ConnectionResetError as error:
                raise PeerGone("the other end is closed") from error
            if count == 0:
                raise PeerGone("the other end is closed")
            filled += count
        return buffer

    def _wait(self, event: int, seconds: float | None) -> bool:
        """Whether the event came within so many seconds; None waits without limit."""
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(self._socket, event)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))


@dataclass(frozen=True, slots=True)
class AsyncChannel:
    """One end of the socket pair in an event loop."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, message: object) -> None:
        """Write a picklable message when the peer reads. A peer that has ended is noticed by `receive`."""
        self.writer.write(_packed(message))

    async def receive(self) -> Any:
        """Read the next message; a `PeerGone` at the end of the stream."""
        try:
            (size,) = _HEADER.unpack(await self.reader.readexactly(_HEADER.size))
            return pickle.loads(await self.reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise PeerGone("the other end is closed") from error


def _packed(message: object) -> bytes:
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(payload)) + payload
