"""One push into several API servers at once: gathered once, by all ranks in lockstep, and fed by rank 0.

A server that drops out of a push does not hold the others up; it is lost, and gets everything anew when it is back. A
server that refuses a push is a mistake of ours or damage on the way, and ends the push for all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from oblr_megatron.engine import http_messages as http
from oblr_megatron.engine.protocol import PushStats
from oblr_megatron.errors import EngineLostError, WeightError
from oblr_megatron.rollout.server_client import ServerLostError, VllmServer, reasons
from oblr_megatron.runtime.http_loop import HttpLoop
from oblr_megatron.weights.manifest import Manifest, Source, manifest_of
from oblr_megatron.weights.names import ModelShape
from oblr_megatron.weights.shm import HALVES, Bucket, SharedBuffer, bucket_capacity, fill_buckets
from oblr_megatron.weights.verify import Digests, expected_digests, first_difference


class Transport(Protocol):
    """How a bucket's bytes reach the servers; what is in it, they are told over HTTP."""

    def capacity(self, manifest: Manifest) -> int:
        """Bytes of a bucket; called on every rank."""
        ...

    def reserve(self, size: int) -> SharedBuffer:
        """Where buckets are gathered; on rank 0, as everything below."""
        ...

    async def connect(self, server: VllmServer, open_push: OpenPush) -> None:
        """Make the server ready to receive: `open_push` hands it the parameters."""
        ...

    def send(self, bucket: Bucket, servers: Sequence[VllmServer]) -> None:
        """Called when the servers have been told of the bucket, not when they have taken it."""
        ...

    def drop(self, server: VllmServer) -> None:
        """Wait no more for a server."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


OpenPush = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]


class SharedMemoryTransport:
    """Servers on rank 0's machine map its memory; there is nothing to send."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._buffer: SharedBuffer | None = None

    def capacity(self, manifest: Manifest) -> int:
        """See `DataPlane`."""
        return bucket_capacity(manifest, self._bucket_bytes)

    def reserve(self, size: int) -> SharedBuffer:
        """See `DataPlane`."""
        if self._buffer is None:
            self._buffer = SharedBuffer.create()
        self._buffer.reserve(size)
        return self._buffer

    async def connect(self, server: VllmServer, open_push: OpenPush) -> None:
        """Tell the server where the memory is."""
        from oblr_megatron.engine.transfer_server import PeerMemory

        assert self._buffer is not None, "reserve comes first"
        await open_push(PeerMemory.of(self._buffer).as_dict())

    def send(self, bucket: Bucket, servers: Sequence[VllmServer]) -> None:
        """The bytes are there."""

    def drop(self, server: VllmServer) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Give the memory back."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


@dataclass(slots=True)
class Push:
    """A push on its way, seen from rank 0."""

    holding: http.Holding
    manifest: Manifest
    servers: list[VllmServer]  # that still take part
    begin: float
    faulty: list[VllmServer] = field(default_factory=list)  # that took it not, or not right
    buckets: int = 0
    error: BaseException | None = None  # that ends the push for all servers; raised only when all ranks have gathered
    unanswered: Future[list[BaseException | None]] | None = None
    checksums: list[int | None] = field(default_factory=list)


class ServerPusher:
    """Rank 0's side of all pushes; the other ranks gather along, see `push`."""

    def __init__(self, loop: HttpLoop, transport: Transport, seconds: float) -> None:
        """Args:
        loop: in which the servers are spoken to.
        plane: the way of the bytes.
        seconds: deadline of a push.
        """
        self._loop, self._transport, self._seconds = loop, transport, seconds

    def start(self, servers: Sequence[VllmServer], manifest: Manifest, holding: http.Holding, size: int) -> Push:
        """Have the servers open the data plane and stop serving. Failures are kept for `finish`: see `push`."""
        push = Push(holding, manifest, list(servers), time.monotonic())
        for server in servers:
            server.ready = False
        self._transport.reserve(size)
        body = http.StartBody(holding=holding, manifest=[(spec.name, spec.dtype, spec.shape) for spec in manifest])

        async def open_and_start(server: VllmServer) -> None:
            async def open_push(init_info: dict[str, Any]) -> None:
                await self._tell(push, server, http.PUSH_OPEN, http.OpenBody(init_info=init_info))

            await self._transport.connect(server, open_push)
            await self._tell(push, server, http.PUSH_START, body)

        self._post(push, open_and_start)
        self._settle(push)
        return push

    def update(self, push: Push, bucket: Bucket, update_info: dict[str, Any]) -> None:
        """Tell of a bucket, once all servers are done with the one before."""
        self._settle(push)
        body = http.UpdateBody(holding=push.holding, update_info=update_info)
        self._post(push, lambda server: self._tell(push, server, http.PUSH_UPDATE, body))
        self._transport.send(bucket, push.servers)
        push.buckets += 1
        push.checksums.append(bucket.checksum)

    def finish(self, push: Push) -> PushStats:
        """Have the servers serve what they got; a server that has is `ready`.

        Raises:
            ServerRefusedError: a server took it not.
        """
        self._settle(push)
        if push.error is not None:
            self._refuse(push)
        body = http.FinishBody(holding=push.holding)
        self._post(push, lambda server: self._tell(push, server, http.PUSH_FINISH, body))
        self._settle(push)
        if push.error is not None:
            self._refuse(push)
        for server in push.servers:
            server.lost, server.ready = None, True
        return PushStats(
            bytes=sum(spec.num_bytes for spec in push.manifest),
            seconds=time.monotonic() - push.begin,
            tensors=len(push.manifest),
            buckets=push.buckets,
        )

    def verify(self, push: Push, expected: Mapping[int, list[Digests]]) -> None:
        """Have the servers read back what they now serve.

        Args:
            push: that has been finished.
            expected: digests by worker, of an engine of so many workers.

        Raises:
            WeightError: a server holds something else; no server is to be used then.
        """

        async def compare(server: VllmServer) -> None:
            left = self._seconds - (time.monotonic() - push.begin)
            different = first_difference(expected[server.workers], await server.digests(max(0.1, left)))
            if different is not None:
                raise WeightError(f"{server.name} holds another {different} than was pushed (weights.verify)")

        self._post(push, compare)
        self._settle(push)
        if push.error is not None:
            self._refuse(push)

    def _refuse(self, push: Push) -> NoReturn:
        """Have all servers refuse what some of them did not take right."""
        assert push.error is not None, "something went wrong"
        push.servers += push.faulty
        self.abort(push, str(push.error))
        for server in push.servers:
            server.ready = False
        raise push.error

    def abort(self, push: Push, reason: str) -> None:
        """Have the servers refuse to generate until a later push succeeds; those that do not hear it do so anyway."""
        self._settle(push)
        body = http.AbortBody(holding=push.holding, reason=reason)
        self._post(push, lambda server: self._tell(push, server, http.PUSH_ABORT, body))
        self._settle(push)

    def close(self) -> None:
        """Free the data plane."""
        self._transport.close()

    async def _tell(self, push: Push, server: VllmServer, path: str, body: http.Message) -> None:
        left = self._seconds - (time.monotonic() - push.begin)
        await server.tell(path, body, f"push {push.holding.version} into {server.name}", max(0.1, left))

    def _post(self, push: Push, call: Callable[[VllmServer], Coroutine[Any, Any, None]]) -> None:
        async def to_all() -> list[BaseException | None]:
            return await asyncio.gather(*map(call, push.servers), return_exceptions=True)

        push.unanswered = self._loop.submit(to_all())

    def _settle(self, push: Push) -> None:
        """Wait for the answers that are owed, and drop who failed."""
        if push.unanswered is None:
            return
        outcomes, push.unanswered = push.unanswered.result(), None
        for server, error in zip(list(push.servers), outcomes, strict=True):
            if error is None:
                continue
            if not isinstance(error, ServerLostError):
                push.error = push.error or error
                push.faulty.append(server)
            server.lose(str(error))
            push.servers.remove(server)
            self._transport.drop(server)


def push(
    pusher: ServerPusher | None,
    transport: Transport,
    source: Source,
    holding: http.Holding,
    servers: Sequence[VllmServer],
    *,
    checksum: bool,
    verify: ModelShape | None = None,
) -> tuple[PushStats, list[int | None]] | None:
    """One push, called on every rank; the source is iterated to its end on each of them, whatever the servers do.

    Args:
        pusher: on rank 0; None elsewhere.
        plane: the way of the bytes.
        source: collective over the ranks that share its tensors.
        holding: whose weights these are, and which.
        servers: that shall have them; used on rank 0.
        checksum: take each bucket's.
        verify: sizes of the model, to gather once more and compare with what the servers read back.

    Returns:
        What was moved and the buckets' checksums, on rank 0; None elsewhere.

    Raises:
        RunError: a server took it not, or (EngineLostError) none is left.
    """
    from oblr_megatron.engine.transfer import ShmUpdateInfo

    manifest = manifest_of(source)
    capacity = transport.capacity(manifest)
    if pusher is None:
        for _ in fill_buckets(source, capacity, None):
            pass
        for _ in source if verify is not None else ():
            pass
        return None
    begun = pusher.start(servers, manifest, holding, HALVES * capacity)
    try:
        for bucket in fill_buckets(source, capacity, transport.reserve(HALVES * capacity), checksum=checksum):
            pusher.update(begun, bucket, vars(ShmUpdateInfo.of(bucket)))
    except BaseException as error:
        pusher.abort(begun, f"the trainer broke off: {error!r}")
        raise
    stats = pusher.finish(begun)
    if verify is not None:
        pusher.verify(begun, _digests(source, verify, {server.workers for server in servers}))
    if not begun.servers:
        raise EngineLostError(f"push {holding.version} reached no server: {reasons(servers)}")
    return stats, begun.checksums


def _digests(source: Source, shape: ModelShape, counts: set[int]) -> dict[int, list[Digests]]:
    """What engines of so many workers should hold; one pass over the source for all of them."""
    found: dict[int, list[Digests]] = {count: [{} for _ in range(count)] for count in counts}
    for pair in source:
        for count, workers in found.items():
            for held, part in zip(workers, expected_digests([pair], shape, count), strict=True):
                held |= part  # noqa: PLW2901  in place
    return found
