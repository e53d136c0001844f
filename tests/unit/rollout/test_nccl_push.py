"""The parts of the NCCL transport that work without NCCL: unpacking a bucket, and the rendezvous' thread.

Not covered: communicators, broadcasts, vLLM's layer-wise reload.
"""

import asyncio
import threading

import pytest
import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from oblr_megatron.engine.plugin import NCCL_BACKEND, register_transfer_engines
from oblr_megatron.engine.transfer import ShmUpdateInfo
from oblr_megatron.engine.transfer_nccl import CheckedNcclWeightTransferEngine, _tensors
from oblr_megatron.errors import WeightError
from oblr_megatron.rollout.nccl_push import NcclTransport, _address_towards, _in_thread
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
    capacity = NcclTransport(1, torch.device("cpu")).capacity(manifest_of(source))
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


def test_a_failed_rendezvous_raises_and_a_hanging_one_blocks_nothing():
    def fails():
        raise OSError("no answer")

    async def both():
        never = threading.Event()
        hanging = _in_thread(never.wait)
        assert await _in_thread(lambda: 7) == 7
        with pytest.raises(OSError, match="no answer"):
            await _in_thread(fails)
        hanging.cancel()
        never.set()

    asyncio.run(both())
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "nccl rendezvous")
