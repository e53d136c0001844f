"""The trainer's side of `oblr_nccl`: buckets go from rank 0's GPU to API servers on other GPUs. Not yet run on a GPU.

Each server has its own communicator: the trainer is rank 0, and the server's workers follow. A bucket is gathered once.
It is broadcast to each server on a separate stream, while an HTTP request tells the server to receive it. Rank 0 waits
for the server's HTTP answer, not for the broadcast. If a server does not answer, its communicator is aborted, which
frees the stream.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch

from oblr_megatron.rollout.server_client import ServerLostError, ServerRefusedError, VllmServer
from oblr_megatron.runtime.threads import in_thread
from oblr_megatron.weights.device_buffer import DeviceBuffer
from oblr_megatron.weights.manifest import Manifest
from oblr_megatron.weights.shm import Bucket, bucket_capacity

if TYPE_CHECKING:
    from oblr_megatron.rollout.server_push import OpenPush


ABORT_SECONDS = 0.2
"""Between looks at a rendezvous that nobody waits for any more."""


@dataclass(slots=True)
class _Link:
    """The communicator with one server process."""

    instance: str  # of the server process; a restarted server has another one
    group: Any  # vLLM's PyNcclCommunicator
    stream: Any


class NcclTransport:
    """A `Transport` over NCCL."""

    def __init__(self, bucket_bytes: int, device: torch.device, seconds: float) -> None:
        """A bucket has `bucket_bytes`, or the size of the largest tensor if that is more. It may take `seconds`."""
        self._bucket_bytes, self._device, self._seconds = bucket_bytes, device, seconds
        self._buffer = DeviceBuffer(device)
        self._links: dict[str, _Link] = {}

    def capacity(self, manifest: Manifest) -> int:
        """See `Transport`. vLLM's loaders on a GPU need whole tensors, so the largest one must fit."""
        largest = max((spec.num_bytes for spec in manifest), default=0)
        return bucket_capacity(manifest, max(self._bucket_bytes, largest))

    def reserve(self, size: int) -> DeviceBuffer:
        self._buffer.reserve(size)
        return self._buffer

    async def connect(self, server: VllmServer, open_push: OpenPush) -> None:
        """Open a communicator if the server process has none; both sides must join at the same time.

        Raises:
            ServerLostError: a side could not join. Its backend was checked before the run, so this is the network.
        """
        link = self._links.get(server.url)
        if link is not None and link.instance == server.instance:
            return
        self.drop(server)
        rendezvous = {
            "master_address": await asyncio.to_thread(_address_towards, server.url),
            "master_port": _free_port(),
            "world_size": 1 + server.workers,
        }
        begun: list[Any] = []
        thread = in_thread(lambda: _join(rendezvous, self._device, begun), "nccl rendezvous")
        joined = asyncio.wrap_future(thread)
        opened = asyncio.ensure_future(open_push({**rendezvous, "rank_offset": 1, "seconds": self._seconds}))
        try:
            # Shielded: a thread cannot be cancelled, and what it returns later must still be freed.
            await asyncio.gather(opened, asyncio.shield(joined))
        except BaseException as error:  # whatever ended the wait, the thread's group must be freed
            opened.cancel()
            in_thread(lambda: _free(thread, begun), "nccl abort")
            if isinstance(error, ServerRefusedError):
                raise ServerLostError(str(error)) from error
            raise
        self._links[server.url] = _Link(server.instance, joined.result(), torch.cuda.Stream(self._device))

    def send(self, bucket: Bucket, servers: Sequence[VllmServer]) -> None:
        """Broadcast to each server on its stream; returns before the bytes are sent."""
        data = self._buffer.bytes[bucket.start : bucket.start + bucket.used]
        for server in servers:
            link = self._links[server.url]
            link.stream.wait_stream(torch.cuda.current_stream(self._device))  # the bucket is complete
            link.group.broadcast(data, src=0, stream=link.stream)

    def drop(self, server: VllmServer) -> None:
        """Abort the communicator, which ends kernels that wait for a dead peer."""
        link = self._links.pop(server.url, None)
        if link is not None:
            link.group.destroy()

    def close(self) -> None:
        """Abort all communicators."""
        for link in self._links.values():
            link.group.destroy()
        self._links.clear()


def _join(rendezvous: dict[str, Any], device: torch.device, begun: list[Any]) -> Any:
    """Rank 0's end of the communicator, as vLLM's `trainer_init` makes it.

    Its constructor waits for a first all-reduce, without a deadline. `begun` gets the object before, for `_free`.
    """
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.utils.nccl import unpinned_nccl_env

    torch.cuda.set_device(device)  # for this thread
    address, port, size = (rendezvous[name] for name in ("master_address", "master_port", "world_size"))
    group = StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=size)
    communicator = PyNcclCommunicator.__new__(PyNcclCommunicator)
    begun.append(communicator)
    with unpinned_nccl_env():
        communicator.__init__(group, device=torch.accelerator.current_device_index())  # type: ignore[misc]
    return communicator


def _free(joined: Future[Any], begun: list[Any]) -> None:
    """Abort the communicator of a rendezvous that nobody waits for any more, as soon as it has one.

    Otherwise the kernel of its first all-reduce may run on, and the trainer would wait for it at its next
    synchronization.
    """
    while not joined.done() and not (begun and hasattr(begun[0], "comm")):
        time.sleep(ABORT_SECONDS)
    if not joined.done():
        begun[0].destroy()
    elif joined.exception() is None:
        joined.result().destroy()


def _address_towards(url: str) -> str:
    """This machine's IPv4 address on the route to a server: vLLM's rendezvous knows no other kind.

    Raises:
        ServerLostError: the server has no IPv4 address.
    """
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, socket.AF_INET, socket.SOCK_DGRAM)
    except OSError as error:
        raise ServerLostError(f"the push of weights over NCCL needs the IPv4 address of {url}: {error}") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
