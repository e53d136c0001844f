"""Rank 0 alone sends a push; when it fails there, all ranks gather to the end and raise that error.

Not covered: engines and servers (tests/e2e/test_push.py, test_servers.py), NCCL.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oblr_megatron.engine.http_messages import Holding
from oblr_megatron.rollout.push import EngineReceiver, Receiver, push
from oblr_megatron.rollout.server_push import ServerReceiver
from oblr_megatron.runtime.collectives import Collectives, attempt, raise_first
from oblr_megatron.runtime.http_loop import HttpLoop
from oblr_megatron.weights.manifest import manifest_of
from oblr_megatron.weights.shm import SharedBuffer
from tests.distributed.launch import run_ranks
from tests.unit.rollout.test_server_push import StubServer, StubTransport
from tests.unit.weights.test_shm import Tensors

CAPACITY = 64
TENSORS = 6
SECONDS = 30
"""The ranks wait for each other this long; with the error they need none of it."""


class Gathered(Tensors):
    """Every rank takes part in gathering every tensor."""

    def __iter__(self):
        self.gathered = 0
        for name, tensor in self.items:
            shared = tensor.clone()
            dist.all_reduce(shared)
            self.gathered += 1
            yield name, shared


class Failing(SharedBuffer):
    """Memory that lacks room: for itself, or for computing a checksum."""

    @classmethod
    def that_fails_in(cls, step: str) -> Failing:
        buffer = cls.create()
        setattr(buffer, step, buffer.fail)
        return buffer

    def fail(self, *_: Any) -> int:
        raise torch.OutOfMemoryError("rank 0 is out of memory")


def receiver_of(kind: str, step: str, source: Tensors) -> Receiver:
    buffer = Failing.that_fails_in(step)
    if kind == "servers":
        transport = StubTransport(CAPACITY)
        transport._buffer = buffer
        options: Any = {"model": None, "loop": HttpLoop(), "transport": transport, "seconds": SECONDS}
        servers: Any = [StubServer("server 0"), StubServer("server 1")]
        return ServerReceiver(servers, manifest_of(source), Holding(holder="run", version=3), **options)
    nothing = dict.fromkeys(("post", "collect", "wait_ready"), lambda *_, **__: None)
    names = SimpleNamespace(name="engine 0")
    engine: Any = SimpleNamespace(
        buffer=buffer, spec=names, deadlines=SimpleNamespace(push=SECONDS), lost=False, **nothing
    )
    return EngineReceiver(engine, manifest_of(source), version=3)


def end_of_push(kind: str, step: str) -> tuple[str, int, float]:
    """(error, tensors gathered, seconds) on this rank."""
    rank = dist.get_rank()
    collectives, begin = Collectives(rank), time.monotonic()
    source = Gathered([torch.ones(16) for _ in range(TENSORS)])
    receiver = receiver_of(kind, step, source) if rank == 0 else Receiver()
    own = attempt(lambda: push(receiver, source, CAPACITY, verify=False))
    with pytest.raises(RuntimeError) as raised:
        raise_first(collectives.gather(own, what="the push", seconds=SECONDS), own)
    return str(raised.value), source.gathered, time.monotonic() - begin


@pytest.mark.parametrize("step", ["reserve", "checksum"])
@pytest.mark.parametrize("kind", ["servers", "engine"])
def test_a_failure_on_rank_0_ends_all_ranks_with_its_error(kind: str, step: str) -> None:
    for error, gathered, seconds in run_ranks(end_of_push, 2, kind, step, deadline_s=3 * SECONDS):
        assert "rank 0 is out of memory" in error
        assert gathered == TENSORS
        assert seconds < SECONDS / 2
