"""A push into servers that fail in some step: who still gets it, and which error ends it.

Not covered: real servers (tests/e2e/test_servers.py), NCCL.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from oblr_megatron.engine import http_messages as http
from oblr_megatron.engine.core import _refusals, failure
from oblr_megatron.engine.http_door import error_answer
from oblr_megatron.engine.workers import WorkerError, WorkerRefusal
from oblr_megatron.errors import DamagedError, RunError, WeightError
from oblr_megatron.rollout import server_push
from oblr_megatron.rollout.push import push
from oblr_megatron.rollout.server_client import ServerLostError, ServerRefusedError, VllmServer
from oblr_megatron.rollout.server_push import ServerReceiver, SharedMemoryTransport
from oblr_megatron.rollout.servers import ServerEngines
from oblr_megatron.runtime.http_loop import HttpLoop
from oblr_megatron.weights.manifest import Part, manifest_of
from oblr_megatron.weights.shm import compare_checksums
from oblr_megatron.weights.verify import expected_digests
from tests.e2e.tiny_rollout import ONE_RANK, make_config
from tests.unit.weights.test_shm import Tensors
from tests.unit.weights.test_verify import ITEMS, SHAPE, numbered

CAPACITY = 64
TENSORS = Tensors([torch.ones(16) for _ in range(3)])
WHOLE = ["open_push", "start_push", *["update_push"] * 3, "finish_push"]


class StubServer:
    """The part of `VllmServer` that a push uses. `failures` maps a step's method to the errors of its first calls."""

    owner, workers = "rank 0", 1

    def __init__(self, name: str, failures: dict[str, list[Exception]] | None = None) -> None:
        self.name = self.url = name
        self.lost: str | None = None
        self.told: list[str] = []
        self.failures = failures or {}
        self.held: list[dict[str, str]] = []
        self.patience = 0.0

    def lose(self, reason: str) -> None:
        self.lost = reason

    async def tell(self, method: str, arguments: dict[str, Any], what: str, seconds: float) -> None:
        self.told.append(method)
        if self.failures.get(method):
            raise self.failures[method].pop(0)

    async def digests(self, seconds: float) -> list[dict[str, str]]:
        self.patience = seconds
        return self.held


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
        stats = push(receiver, TENSORS, CAPACITY, verify=False)
    assert stats is not None and stats.buckets == 3
    assert other.told == WHOLE and other.lost is None
    assert lost.lost is not None and re.search(reason, lost.lost)


def test_a_server_that_refuses_to_connect_ends_the_push() -> None:
    refusing, other = StubServer("one", {"open_push": [ServerRefusedError("another machine")]}), StubServer("two")
    with receiver_of([refusing, other]) as receiver, pytest.raises(ServerRefusedError, match="another machine"):
        push(receiver, TENSORS, CAPACITY, verify=False)
    assert "finish_push" not in other.told and other.told[-1] == "abort_push"


def refused(step: str, *errors: Exception) -> Any:
    return {step: list(errors)}


@pytest.fixture
def engines_of(tiny_hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = []

    def make(*servers: Any) -> ServerEngines:
        engines = ServerEngines(make_config(tiny_hf, tmp_path / "run", servers=["http://127.0.0.1:9"]), ONE_RANK)
        made.append(engines)
        engines._transport = StubTransport()
        monkeypatch.setattr(engines._servers, "wait_for_any", lambda _: asyncio.sleep(0, 0))
        monkeypatch.setattr(engines._servers, "present", lambda: [one for one in servers if one.lost is None])
        return engines

    yield make
    for engines in made:
        engines.close()


@pytest.mark.parametrize("step", ["update_push", "finish_push"])
def test_a_push_with_a_damaged_bucket_is_sent_once_more_to_all_servers(step: str, engines_of: Any) -> None:
    servers = [StubServer("one", refused(step, DamagedError("a bucket"))), StubServer("two")]
    engines = engines_of(*servers)
    assert engines.push(TENSORS, 1).buckets == 3
    assert all(server.told[-len(WHOLE) :] == WHOLE and server.lost is None for server in servers)
    assert all("abort_push" in server.told for server in servers)
    assert engines.metrics() == {"rollout/restarts": 0}


def test_damage_in_a_second_push_is_raised_as_damage(engines_of: Any) -> None:
    """`run` saves a checkpoint for it, and for a refusal it does not."""
    server = StubServer("one", refused("update_push", *[DamagedError("a bucket")] * 2))
    with pytest.raises(DamagedError):
        engines_of(server).push(TENSORS, 1)
    assert server.told.count("start_push") == 2


def test_a_refusal_is_not_pushed_again_when_another_server_finds_damage(engines_of: Any) -> None:
    for errors in ([DamagedError("a bucket"), ServerRefusedError("no")], [ServerRefusedError("no"), DamagedError("")]):
        servers = [StubServer(str(error), refused("update_push", error)) for error in errors]
        with pytest.raises(ServerRefusedError, match="no"):
            engines_of(*servers).push(TENSORS, 1)
        assert [server.told.count("start_push") for server in servers] == [1, 1]


@pytest.mark.parametrize("damaged", [True, False])
def test_damage_in_vllms_worker_reaches_the_trainer_as_damage(damaged: bool) -> None:
    """The engine gets the worker's error as text."""
    text = "another fault"
    if damaged:
        with pytest.raises(DamagedError) as raised:
            compare_checksums(7, 8, [Part.whole(spec) for spec in manifest_of(TENSORS)])
        text = str(raised.value)

    with pytest.raises(RunError) as refusal, _refusals():
        raise WorkerRefusal(text)
    reply = failure(refusal.value)
    answer = error_answer(reply.kind(reply.error))
    assert answer.body is not None
    with pytest.raises(DamagedError if damaged else ServerRefusedError, match=f"http://a refused push 3: .*{text[:9]}"):
        VllmServer("http://a", "")._raise(answer.status, answer.body, "push 3")


def test_a_broken_worker_costs_the_server_and_not_the_push() -> None:
    with pytest.raises(WorkerError) as broken, _refusals():
        raise WorkerError("CUDA error")
    reply = failure(broken.value)
    answer = error_answer(reply.kind(reply.error))
    assert answer.body is not None
    with pytest.raises(ServerLostError, match=r"status 500 .* push 3: .*CUDA error"):
        VllmServer("http://a", "")._raise(answer.status, answer.body, "push 3")


@pytest.fixture
def small_model() -> Tensors:
    source = Tensors([])
    source.items = [(name, numbered(name)) for name in ITEMS]
    return source


def test_reading_back_has_a_deadline_of_its_own(small_model: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer has gathered everything a second time by then."""
    monkeypatch.setattr(server_push, "read_shape", lambda _: SHAPE)
    one, two = StubServer("one"), StubServer("two")
    two.workers = 2
    for server in (one, two):
        server.held = expected_digests(small_model, SHAPE, {server.workers})[server.workers]
    with receiver_of([one, two]) as receiver:
        receiver.begin -= 1000
        receiver.verify(small_model)
        assert receiver.error is None and one.patience == two.patience == 30
        two.held[1]["model.norm.weight"] = "other"
        receiver.verify(small_model)
    assert isinstance(receiver.error, WeightError)
    assert str(receiver.error).startswith("two") and "model.norm.weight of worker 1" in str(receiver.error)


def test_a_failure_of_the_comparison_leaves_no_rank_in_the_second_gather(small_model: Tensors, tmp_path: Path) -> None:
    gathered = []

    class Counted(Tensors):
        def __iter__(self) -> Iterator[Any]:
            for pair in self.items:
                gathered.append(pair[0])
                yield pair

    source = Counted([tensor for _, tensor in small_model])
    with receiver_of([StubServer("one")], model=tmp_path) as receiver:
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            push(receiver, source, 2**16, verify=True)
        assert len(gathered) == 2 * len(ITEMS), "to the end, twice"
