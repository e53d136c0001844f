"""A push into servers that fail in some step: who still gets it, and which error ends it.

Not covered: real servers (tests/e2e/test_servers.py), NCCL.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from oblr_megatron.engine import http_messages as http
from oblr_megatron.rollout.push import push
from oblr_megatron.rollout.server_client import ServerLostError, ServerRefusedError
from oblr_megatron.rollout.server_push import ServerReceiver, SharedMemoryTransport
from oblr_megatron.runtime.http_loop import HttpLoop
from oblr_megatron.weights.manifest import manifest_of
from tests.unit.weights.test_shm import Tensors

CAPACITY = 64
TENSORS = Tensors([torch.ones(16) for _ in range(3)])
WHOLE = [http.PUSH_OPEN, http.PUSH_START, *[http.PUSH_UPDATE] * 3, http.PUSH_FINISH]


class StubServer:
    """The part of `VllmServer` that a push uses. `failures` maps a step's path to the error of that step."""

    owner, workers = "rank 0", 1

    def __init__(self, name: str, failures: dict[str, Exception] | None = None) -> None:
        self.name = self.url = name
        self.lost: str | None = None
        self.told: list[str] = []
        self.failures = failures or {}

    def lose(self, reason: str) -> None:
        self.lost = reason

    async def tell(self, path: str, body: http.Message, what: str, seconds: float) -> None:
        self.told.append(path)
        if path in self.failures:
            raise self.failures[path]


class StubTransport(SharedMemoryTransport):
    """Shared memory that no server maps. `failures` maps the name of a server to what `connect` raises for it."""

    def __init__(self, bucket_bytes: int = 64, failures: dict[str, Exception] | None = None) -> None:
        super().__init__(bucket_bytes)
        self.failures = failures or {}

    async def connect(self, server: Any, open_push: Any) -> None:
        if server.name in self.failures:
            raise self.failures[server.name]
        if server.name == "silent":
            await asyncio.Event().wait()
        await open_push({})


@contextmanager
def receiver_of(servers: Any, transport: Any = None, seconds: float = 30.0, **options: Any) -> Iterator[ServerReceiver]:
    loop, transport = HttpLoop(), transport or StubTransport()
    settings: Any = {"model": None, "loop": loop, "transport": transport, "seconds": seconds} | options
    try:
        yield ServerReceiver(servers, manifest_of(TENSORS), http.Holding(holder="run", version=3), **settings)
    finally:
        transport.close()
        loop.close()


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("one", RuntimeError("the store timed out"), "rank 0 could not open a connection with one .*: the store timed"),
        ("one", OSError(), "could not open .*: OSError"),
        ("one", ServerLostError("it died"), "it died"),
        ("silent", None, r"rank 0 waited \d.* s for a connection with silent for push 3"),
    ],
)
def test_a_server_that_does_not_connect_is_lost_and_the_other_gets_the_push(name: str, error: Any, reason: str) -> None:
    lost, other = StubServer(name), StubServer("two")
    with receiver_of([lost, other], StubTransport(failures={"one": error}), seconds=8) as receiver:
        stats = push(receiver, TENSORS, CAPACITY, checksum=True, verify=False)
    assert stats is not None and stats.buckets == 3
    assert other.told == WHOLE and other.lost is None
    assert lost.lost is not None and re.search(reason, lost.lost)


def test_a_server_that_refuses_to_connect_ends_the_push() -> None:
    refusing, other = StubServer("one", {http.PUSH_OPEN: ServerRefusedError("another machine")}), StubServer("two")
    with (
        receiver_of([refusing, other]) as receiver,
        pytest.raises(ServerRefusedError, match="another machine"),
    ):
        push(receiver, TENSORS, CAPACITY, checksum=True, verify=False)
    assert http.PUSH_FINISH not in other.told and other.told[-1] == http.PUSH_ABORT
