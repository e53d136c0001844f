"""The parts of the NCCL transport that work without NCCL: unpacking a bucket, and the rendezvous' thread.

Not covered: communicators, broadcasts, vLLM's layer-wise reload.
"""

import asyncio
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from oblr_megatron.engine.plugin import NCCL_BACKEND, register_transfer_engines
from oblr_megatron.engine.transfer import ShmUpdateInfo
from oblr_megatron.engine.transfer_nccl import CheckedNcclWeightTransferEngine, _tensors
from oblr_megatron.errors import RunError, WeightError
from oblr_megatron.rollout import nccl_push
from oblr_megatron.rollout.nccl_push import NcclTransport, _address_towards
from oblr_megatron.rollout.server_client import ServerLostError, ServerRefusedError
from oblr_megatron.weights.device_buffer import DeviceBuffer, device_checksum
from oblr_megatron.weights.manifest import manifest_of
from oblr_megatron.weights.shm import HALVES, fill_buckets
from tests.e2e.tiny_rollout import Weights


def updates(source, capacity):
    """(update info, received bytes) of each bucket."""
    buffer = DeviceBuffer(torch.device("cpu"))
    buffer.reserve(HALVES * capacity)
    for bucket in fill_buckets(source, capacity, buffer):
        yield ShmUpdateInfo(**bucket.update_info()), buffer.bytes[bucket.start : bucket.start + bucket.used].clone()


def test_received_bytes_become_the_tensors_that_were_sent():
    source = Weights(torch.nn.Linear(7, 5).to(torch.bfloat16))
    capacity = NcclTransport(1, torch.device("cpu"), 60.0).capacity(manifest_of(source))
    assert 70 <= capacity < 140, "the largest tensor fits, and two do not"
    found, count = {}, 0
    for info, received in updates(source, capacity):
        assert device_checksum(received) == info.checksum
        found |= dict(_tensors(info, received))
        count += 1
    assert count == 2 and found.keys() == source.tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in source.tensors.items())


def test_tensors_in_pieces_are_refused():
    with pytest.raises(WeightError, match="came in pieces"):
        for info, received in updates(Weights(torch.nn.Linear(7, 5)), capacity=64):
            _tensors(info, received)


def test_the_backend_is_known_to_vllm():
    register_transfer_engines()
    assert NCCL_BACKEND in WeightTransferEngineFactory._registry
    assert issubclass(CheckedNcclWeightTransferEngine, NCCLWeightTransferEngine)


def test_the_address_is_one_of_this_machine():
    assert _address_towards("http://127.0.0.1:8000") == "127.0.0.1"


@pytest.mark.parametrize("host", ["[::1]", "no-such-host.invalid"])
def test_a_server_without_an_ipv4_address_is_lost_with_a_reason(host):
    with pytest.raises(ServerLostError, match="needs the IPv4 address of http"):
        _address_towards(f"http://{host}:8000")


@pytest.mark.parametrize("answers", [0, 3])
def test_a_worker_does_not_wait_for_a_trainer_that_is_gone(monkeypatch, answers):
    """`answers`: of the event that says whether the broadcast is done, before it says yes; 0: it never does."""
    asked, aborted = [], []

    class Event:
        def record(self):
            pass

        def query(self):
            asked.append(1)
            return len(asked) == answers

    monkeypatch.setattr(torch.cuda, "Event", Event)
    engine = object.__new__(CheckedNcclWeightTransferEngine)
    engine.model_update_group, engine._seconds = SimpleNamespace(destroy=lambda: aborted.append(1)), 0.05
    with nullcontext() if answers else pytest.raises(RunError, match=r"sent no bucket for 0\.05 s"):
        engine._wait()
    assert bool(aborted) == (not answers) and (engine.model_update_group is None) == (not answers)


SERVER = SimpleNamespace(url="http://127.0.0.1:8000", workers=1, instance="7d3a90")


def test_a_communicator_that_never_finishes_its_first_all_reduce_is_aborted(monkeypatch):
    """HTTP works, and NCCL's data path does not. A kernel that runs on would stop the trainer."""
    aborted = threading.Event()

    def join(_rendezvous, _device, begun):
        begun.append(SimpleNamespace(destroy=aborted.set, comm=1))
        assert aborted.wait(20)
        raise RuntimeError("aborted")

    async def open_push(_):
        await asyncio.sleep(0.1)
        raise ServerLostError("no answer")

    async def connect():
        with pytest.raises(ServerLostError, match="no answer"):
            await NcclTransport(1, torch.device("cpu"), 60.0).connect(SERVER, open_push)

    monkeypatch.setattr(nccl_push, "_join", join)
    asyncio.run(connect())
    assert aborted.wait(20)


@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
@pytest.mark.parametrize("error", [ServerLostError("no answer"), ServerRefusedError("no answer")])
def test_a_communicator_is_freed_if_the_server_did_not_join(monkeypatch, error, late):
    """Its refusal is a failed rendezvous as well: the server is lost, and no mistake ends the run."""
    arrives, joined, freed = threading.Event(), threading.Event(), threading.Event()

    def join(*_):
        arrives.wait(20)
        joined.set()
        return SimpleNamespace(destroy=freed.set)

    async def open_push(_):
        if not late:
            arrives.set()
            while not joined.is_set():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        raise error

    async def connect():
        transport = NcclTransport(1, torch.device("cpu"), 60.0)
        with pytest.raises(ServerLostError, match="no answer"):
            await transport.connect(SERVER, open_push)
        assert not transport._links and (late or joined.is_set())
        arrives.set()
        for _ in range(1000):
            if freed.is_set():
                break
            await asyncio.sleep(0.01)

    monkeypatch.setattr(nccl_push, "_join", join)
    asyncio.run(connect())
    assert freed.is_set()
