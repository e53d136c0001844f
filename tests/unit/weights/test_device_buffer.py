"""The checksum that GPUs compute, and buckets in a device buffer (here on a CPU). Not covered: CUDA, NCCL."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from oblr_megatron.errors import DamagedError
from oblr_megatron.weights import device_buffer
from oblr_megatron.weights.device_buffer import DeviceBuffer, device_checksum
from oblr_megatron.weights.shm import HALVES, fill_buckets, read_bucket
from tests.e2e.tiny_rollout import Weights


def by_hand(data: bytes) -> int:
    whole = len(data) // 8 * 8
    values = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, whole, 8)] + list(data[whole:])
    return sum((2 * i + 1) * value for i, value in enumerate(values)) % 2**64


@given(st.binary(max_size=100), st.sampled_from([8, 16, 48, device_buffer._CHUNK_BYTES]))
def test_checksum_by_hand_in_chunks_of_any_size(data, size):
    tensor = torch.frombuffer(bytearray(data + b"."), dtype=torch.uint8)[:-1].clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_buffer, "_CHUNK_BYTES", size)
        assert device_checksum(tensor) == by_hand(data)


class Allocated(TorchDispatchMode):
    """Notes the largest memory that an operation makes for its result."""

    largest = 0

    def __init__(self, given):
        super().__init__()
        self.given = given.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result.untyped_storage() if isinstance(result, torch.Tensor) else None
        if made is not None and made.data_ptr() != self.given:
            self.largest = max(self.largest, made.nbytes())
        return result


@pytest.mark.parametrize("size", [2**24 - 1, 2**24, 2**24 + 8, 2 * 2**24 + 13])
def test_the_checksum_of_a_large_bucket_needs_little_memory(size):
    data = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    whole = size // 8 * 8
    values = torch.cat([data[:whole].view(torch.int64), data[whole:].to(torch.int64)])
    expected = int((values * (2 * torch.arange(len(values)) + 1)).sum()) % 2**64
    with Allocated(data) as allocated:
        assert device_checksum(data) == expected
    assert 0 < allocated.largest <= 2**24


@given(st.binary(min_size=1, max_size=100), st.data())
def test_any_one_flipped_bit_is_found(data, draw):
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
    damaged = tensor.clone()
    damaged[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert device_checksum(tensor) != device_checksum(damaged)


def test_buckets_arrive_and_damage_is_found():
    model = torch.nn.Linear(7, 5)
    source = Weights(model)
    buffer = DeviceBuffer(torch.device("cpu"))
    capacity = 192  # bytes; the weight alone takes 140
    buffer.reserve(HALVES * capacity)
    found = {}
    for bucket in fill_buckets(source, capacity, buffer):
        found |= {part.spec.name: tensor.clone().view(part.spec.shape) for part, tensor in read_bucket(bucket, buffer)}
    assert found.keys() == source.tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in source.tensors.items())
    buffer.bytes[bucket.start] ^= 1
    with pytest.raises(DamagedError):
        read_bucket(bucket, buffer)
