"""A push into several API servers at once. Rank 0 sends it; `push.push` gathers the tensors once for all servers.
Imports no vllm.

A server that is lost during a push does not delay the others; when it is back, it gets all weights again. A server that
refuses a push ends the push for all: the trainer is wrong. A bucket that was damaged on the way ends it, too; the
engines then push once more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from oblr_megatron.engine.http_messages import Holding
from oblr_megatron.engine.protocol import PushStats
from oblr_megatron.errors import DamagedError, DeadlineError, EngineLostError, RunError
from oblr_megatron.rollout.push import LockstepReceiver, check_digests
from oblr_megatron.rollout.server_client import ServerLostError, VllmServer, reasons
from oblr_megatron.runtime.http_loop import HttpLoop
from oblr_megatron.weights.adapter import AdapterShape
from oblr_megatron.weights.manifest import Manifest
from oblr_megatron.weights.names import read_shape
from oblr_megatron.weights.peer_memory import PeerMemory
from oblr_megatron.weights.shm import HALVES, Bucket, SharedBuffer, bucket_capacity
from oblr_megatron.weights.verify import expected_digests


class Transport(Protocol):
    """The way of a bucket's bytes to the servers. Its description is sent over HTTP."""

    def capacity(self, manifest: Manifest) -> int:
        """Bytes of a bucket; called on every rank, unlike the other methods."""
        ...

    def reserve(self, size: int) -> SharedBuffer:
        """Memory to gather buckets in, at least `size` bytes."""
        ...

    async def connect(self, server: VllmServer, open_push: OpenPush) -> None:
        """Make the server ready to receive; `open_push` sends it the transport's parameters.

        A server counts as lost after any error but a refusal, and after half of the push's deadline.
        """
        ...

    def send(self, bucket: Bucket, servers: Sequence[VllmServer]) -> None:
        """Send a bucket. The servers have been told of it, and have not answered yet."""
        return

    def drop(self, server: VllmServer) -> None:
        """Stop waiting for a server."""
        return

    def close(self) -> None:
        """Free everything."""
        ...


OpenPush = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]


class SharedMemoryTransport(Transport):
    """For servers on rank 0's machine: they map its memory, so nothing is sent."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._buffer: SharedBuffer | None = None

    def capacity(self, manifest: Manifest) -> int:
        return bucket_capacity(manifest, self._bucket_bytes)

    def reserve(self, size: int) -> SharedBuffer:
        if self._buffer is None:
            self._buffer = SharedBuffer.create()
        self._buffer.reserve(size)
        return self._buffer

    async def connect(self, server: VllmServer, open_push: OpenPush) -> None:
        """Send the server the place of the memory."""
        assert self._buffer is not None, "reserve comes first"
        await open_push(vars(PeerMemory.of(self._buffer)))

    def close(self) -> None:
        """Free the memory."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


class ServerReceiver(LockstepReceiver):
    """Sends one push from rank 0 to all its servers."""

    def __init__(
        self,
        servers: Sequence[VllmServer],
        manifest: Manifest,
        holding: Holding,
        *,
        model: Path,
        loop: HttpLoop,
        transport: Transport,
        seconds: float,
        lora: AdapterShape | None = None,
    ) -> None:
        """Args:
        loop: runs the servers' coroutines.
        seconds: deadline of the push.
        lora: the shape of adapters, if the push may be one.
        """
        super().__init__(manifest)
        self._asked, self.servers = tuple(servers), list(servers)  # all of them, and those that still take part
        self._faulty: list[VllmServer] = []  # servers that refused something
        self._holding, self._model, self._lora = holding, model, lora
        self._loop, self._transport, self._seconds = loop, transport, seconds
        self._unanswered: Future[list[BaseException | None]] | None = None
        self.checksums: list[int | None] = []  # one for each bucket

    def start(self, capacity: int) -> SharedBuffer | None:
        buffer: SharedBuffer | None = None

        async def open_and_start(server: VllmServer) -> None:
            await self._connect(server)
            await self._tell(server, "start_push", holding=self._holding, manifest=self._manifest)

        def start() -> None:
            nonlocal buffer
            buffer = self._transport.reserve(HALVES * capacity)
            self._call(open_and_start)

        self.attempt(start)
        return buffer if self.error is None else None

    def update(self, bucket: Bucket) -> None:
        def send() -> None:
            arguments = {"holding": self._holding, "update_info": bucket.update_info()}
            self._call(lambda server: self._tell(server, "update_push", **arguments), wait=False)
            self._transport.send(bucket, self.servers)

        self.attempt(send)
        self.buckets += 1
        self.checksums.append(bucket.checksum)

    def finish(self) -> None:
        """See `Receiver`. A server that has taken the push is ready to sample."""
        self.attempt(lambda: self._call(lambda server: self._tell(server, "finish_push", holding=self._holding)))
        self.end = time.monotonic()
        for server in self.servers if self.error is None else ():
            server.lost = None

    def compare(self, source: Iterable[tuple[str, Tensor]]) -> None:
        sizes = {server.workers for server in self.servers}
        expected = expected_digests(source, read_shape(self._model), sizes, self._lora)

        async def check(server: VllmServer) -> None:  # with a deadline of its own: gathering again has taken time
            check_digests(server.name, expected[server.workers], await server.digests(self._seconds))

        self._call(check)

    def abort(self, reason: str) -> None:
        """See `Receiver`.

        A server that misses the abort is lost or has an unfinished push. In both cases it does not sample.
        """
        reason = f"push {self._holding.version} failed: {reason}"
        arguments = {"holding": self._holding, "reason": reason}
        with suppress(Exception):  # answers to a push that is given up
            self._settle()
        self.servers, self._faulty = self.servers + self._faulty, []
        with suppress(Exception):  # it has failed for another reason, which is raised
            self._call(lambda server: self._tell(server, "abort_push", **arguments))

    def result(self) -> PushStats | None:
        """See `Receiver`; an `EngineLostError` if no server is left."""
        stats = super().result()
        if not self.servers:
            raise EngineLostError(f"push {self._holding.version} reached no server: {reasons(self._asked)}")
        return stats

    async def _connect(self, server: VllmServer) -> None:
        """Let the transport connect. It fails for one server alone, unless that server refuses the push."""
        what = f"a connection with {server.name} for push {self._holding.version}"
        seconds = self._left() / 2  # the servers that do connect need the rest

        async def open_push(init_info: dict[str, Any]) -> None:
            await self._tell(server, "open_push", init_info=init_info)

        try:
            async with asyncio.timeout(seconds):
                await self._transport.connect(server, open_push)
        except RunError:
            raise
        except TimeoutError:
            raise ServerLostError(str(DeadlineError(server.owner, what, round(seconds, 1)))) from None
        except Exception as error:  # any error: a rendezvous has many
            reason = str(error) or type(error).__name__
            raise ServerLostError(f"{server.owner} could not open {what}: {reason}") from error

    async def _tell(self, server: VllmServer, method: str, **arguments: Any) -> None:
        await server.tell(method, arguments, f"push {self._holding.version}", self._left())

    def _left(self) -> float:
        return max(0.1, self._seconds - (time.monotonic() - self.begin))

    def _call(self, call: Callable[[VllmServer], Coroutine[Any, Any, None]], *, wait: bool = True) -> None:
        """Call for every server after the previous calls were answered."""
        self._settle()

        async def to_all() -> list[BaseException | None]:
            return await asyncio.gather(*map(call, self.servers), return_exceptions=True)

        self._unanswered = self._loop.submit(to_all())
        if wait:
            self._settle()

    def _settle(self) -> None:
        """Wait for the answers that are due. Servers that failed take no further part; a refusal is raised."""
        if self._unanswered is None:
            return
        outcomes, self._unanswered = self._unanswered.result(), None
        refusal: BaseException | None = None
        for server, error in zip(list(self.servers), outcomes, strict=True):
            if error is None:
                continue
            if not isinstance(error, ServerLostError):
                # A refusal comes before damage: a second push would not help.
                refusal = error if refusal is None or isinstance(refusal, DamagedError) else refusal
                self._faulty.append(server)
            if not isinstance(error, DamagedError):  # the second push includes this server
                server.lose(str(error))
            self.servers.remove(server)
            self._transport.drop(server)
        if refusal is not None:
            raise refusal
