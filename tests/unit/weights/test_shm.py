"""Buckets in shared memory: tensors arrive unchanged, also in another process, and damage is found.

Not covered: the engine that loads them (tests/e2e/test_rollout.py).
"""

import os
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oblr_megatron.errors import DamagedError, WeightError
from oblr_megatron.weights.manifest import Part, TensorSpec, manifest_of
from oblr_megatron.weights.shm import (
    ALIGNMENT,
    HALVES,
    Bucket,
    SharedBuffer,
    bucket_capacity,
    fill_buckets,
    read_bucket,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


class Tensors:
    """A list of tensors as a source."""

    def __init__(self, tensors):
        self.items = [(f"tensor.{index}", tensor) for index, tensor in enumerate(tensors)]

    def metadata(self):
        return [SimpleNamespace(name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in self.items]

    def __iter__(self):
        return iter(self.items)


@pytest.fixture
def buffer():
    shared = SharedBuffer.create()
    yield shared
    shared.close()


def random_tensor(shape, dtype, seed):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=8), st.integers(1, 700))
@settings(max_examples=100, deadline=None)
def test_every_tensor_arrives_in_order_whatever_the_bucket_size(kinds, bucket_bytes):
    source = Tensors([random_tensor(shape, dtype, seed) for seed, (shape, dtype) in enumerate(kinds)])
    capacity = bucket_capacity(manifest_of(source), bucket_bytes)
    buffer = SharedBuffer.create()
    buffer.reserve(HALVES * capacity)
    arrived, before = {spec: [] for spec in manifest_of(source)}, None
    for bucket in chain(fill_buckets(source, capacity, buffer), [None]):
        if before is not None:  # read a bucket after the next one was filled, as an engine may
            for part, elements in read_bucket(before, buffer):
                assert part.first == sum(len(earlier) for earlier in arrived[part.spec])
                arrived[part.spec].append(elements.clone())
            buffer.bytes[before.start : before.start + capacity].fill_(255)
        before = bucket
        if bucket is not None:
            assert bucket.used <= capacity and bucket.start in (0, capacity)
            assert all(offset % ALIGNMENT == 0 for offset in bucket.offsets)
    buffer.close()
    for (spec, found), (name, sent) in zip(arrived.items(), source, strict=True):
        assert spec.name == name and found[0].dtype == sent.dtype
        assert torch.equal(torch.cat(found).view(spec.shape), sent)


def test_a_rank_without_an_engine_sees_the_same_buckets_and_keeps_nothing(buffer):
    source = Tensors([random_tensor((7,), torch.float32, seed) for seed in range(9)])
    buffer.reserve(400)
    with_engine = [bucket.parts for bucket in fill_buckets(source, 200, buffer)]
    assert [bucket.parts for bucket in fill_buckets(source, 200, None)] == with_engine
    assert len(with_engine) == 3, "200 bytes hold three tensors of 28 bytes, 64 apart"


def test_a_source_is_gathered_to_its_end_when_the_buffer_is_closed(buffer):
    """As it is when the engine dies during a push, while other ranks take part in the gather."""
    buffer.reserve(HALVES * 64)
    buckets = fill_buckets(Tensors([random_tensor((7,), torch.float32, seed) for seed in range(9)]), 64, buffer)
    next(buckets)
    buffer.close()
    assert len(list(buckets)) == 8


def test_views_that_are_not_contiguous_are_sent_by_value(buffer):
    whole = random_tensor((6, 4), torch.float32, 0)
    buffer.reserve(1024)
    (bucket,) = fill_buckets(Tensors([whole.t(), whole[::2, 1:]]), 1024, buffer)
    assert [elements.tolist() for _, elements in read_bucket(bucket, buffer)] == [
        whole.t().flatten().tolist(),
        whole[::2, 1:].flatten().tolist(),
    ]


class Views(Tensors):
    """A source with views that have more dimensions and a wider dtype than declared."""

    def views(self):
        for name, tensor in self.items:
            yield name, tensor.double().unflatten(0, (2, -1)).transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("capacity", [64, 128, 192, 4096])
def test_strided_views_are_cut_and_cast_on_the_way(buffer, capacity):
    """[2, 3, 20] strided rows of a [6, 20] tensor: 192 bytes hold two rows' 160, 128 one row, 64 part of one."""
    source = Views([random_tensor((6, 20), torch.float32, 0)])
    buffer.reserve(HALVES * capacity)
    arrived = []
    for bucket in fill_buckets(source, capacity, buffer):
        arrived += [elements.clone() for _, elements in read_bucket(bucket, buffer)]
    assert torch.equal(torch.cat(arrived).view(6, 20), source.items[0][1])
    assert max(len(elements) for elements in arrived) == {64: 16, 128: 20, 192: 40, 4096: 120}[capacity]


def test_without_a_checksum_damage_is_not_found(buffer):
    """So in the other tests it is the checksum that finds damage."""
    buffer.reserve(256)
    (bucket,) = fill_buckets(Tensors([torch.zeros(4)]), 256, buffer, checksum=False)
    buffer.bytes[3] ^= 64
    assert bucket.checksum is None
    ((part, elements),) = read_bucket(bucket, buffer)
    assert part == Part(TensorSpec("tensor.0", "float32", (4,)), 0, 4)
    assert elements.tolist() == [2.0, 0.0, 0.0, 0.0]


class Liar(Tensors):
    """A source that yields other tensors than its metadata declares."""

    def __init__(self, declared, yielded):
        super().__init__(declared)
        self.yielded = Tensors(yielded).items

    def __iter__(self):
        return iter(self.yielded)


@pytest.mark.parametrize(
    ("yielded", "message"),
    [
        ([torch.zeros(17)], r"yields tensor.0 \[17\] where its metadata declares tensor.0 float32\[16\]"),
        ([], "yields nothing more"),
        ([torch.zeros(16), torch.zeros(1)], "yields tensor.1 after all"),
    ],
)
def test_a_source_that_yields_what_it_does_not_declare_is_refused(buffer, yielded, message):
    buffer.reserve(256)
    with pytest.raises(WeightError, match=message):
        list(fill_buckets(Liar([torch.zeros(16)], yielded), 128, buffer))


@pytest.mark.parametrize("position", [0, 41, 63, 64, 99])
def test_one_changed_bit_anywhere_is_found(buffer, position):
    """Tensors of 42 and 36 bytes: position 63 lies between them."""
    buffer.reserve(256)
    source = Tensors([random_tensor((21,), torch.bfloat16, 0), random_tensor((9,), torch.float32, 1)])
    (bucket,) = fill_buckets(source, 256, buffer)
    assert bucket.used == 100
    buffer.bytes[position] ^= 16
    with pytest.raises(DamagedError, match=r"checksum is .*\(tensor.0 ... tensor.1\)"):
        read_bucket(bucket, buffer)


def test_stale_bytes_between_tensors_do_not_reach_the_checksum(buffer):
    source = Tensors([random_tensor((3,), torch.float32, 0), random_tensor((3,), torch.float32, 1)])
    buffer.reserve(256)
    checksums = set()
    for filling in (0, 255):
        buffer.bytes.fill_(filling)
        checksums |= {bucket.checksum for bucket in fill_buckets(source, 256, buffer)}
    assert len(checksums) == 1


def test_a_bucket_larger_than_the_memory_is_refused(buffer):
    buffer.reserve(64)
    with pytest.raises(WeightError, match=r"64 bytes at 1 .*64 bytes"):
        read_bucket(Bucket((), (), start=1, used=64, checksum=0), buffer)


def test_capacity_is_the_requested_size_up_to_the_models():
    small = manifest_of(Tensors([torch.zeros(16)] * 4))
    large = manifest_of(Tensors([torch.zeros(16), torch.zeros(999)]))
    assert bucket_capacity(small, 2**20) == 4 * 64, "never more than the model"
    assert bucket_capacity(small, 65) == 128, "aligned, so that the second half is"
    assert bucket_capacity(large, 128) == 128, "a tensor of 3996 bytes is spread over buckets"
    assert bucket_capacity((), 128) == 0


def test_another_process_reads_what_was_written_and_sees_the_memory_grow(buffer):
    """The child inherits the descriptor, as an engine does, and maps again after each growth."""
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    child = os.fork()
    if child == 0:
        other = SharedBuffer(buffer.fd)
        for size in (1, 2):
            os.read(to_child, 1)
            other.map()
            os.write(from_child, bytes([size, int(other.bytes.sum()) % 256, other.bytes.numel() // 4096]))
        os._exit(0)
    for index, size in enumerate((4096, 3 * 4096)):
        buffer.reserve(size)
        buffer.bytes.fill_(0)[-1] = 7 + index
        os.write(from_parent, b"x")
        assert list(os.read(to_parent, 3)) == [index + 1, 7 + index, size // 4096]
    assert os.waitpid(child, 0)[1] == 0
    for descriptor in (to_child, from_parent, to_parent, from_child):
        os.close(descriptor)


def test_the_memory_has_no_name_and_closing_twice_is_harmless():
    shared = SharedBuffer.create()
    shared.reserve(4096)
    assert os.readlink(f"/proc/self/fd/{shared.fd}").startswith("/memfd:")
    shared.close()
    shared.close()
    assert shared.bytes.numel() == 0
