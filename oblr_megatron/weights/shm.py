"""The data plane of a push on one machine without CUDA: flat buckets of tensors in anonymous shared memory.

The memory is a memfd that the engine process inherits: it has no name, so nothing is left in /dev/shm however either
side ends. It has two halves. The trainer fills one with a bucket and announces it; while the engine copies the tensors
out, it gathers the next bucket into the other half, and waits for the engine before it goes back to the first. A bucket
carries a checksum over its bytes; the engine refuses one whose bytes have another.

A bucket of a 3 x 2 fp32 and a 5-element bf16 tensor, offsets in bytes from where it starts:

    |0 ......... 23|24 .. 63|64 .... 73|     specs ("a", float32, [3, 2]), ("b", bfloat16, [5])
    | a            | unused | b        |     offsets 0, 64;  used 74
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import xxhash
from torch import Tensor

from oblr_megatron.weights.manifest import Manifest, Source, TensorSpec, WeightError

ALIGNMENT = 64
"""Every tensor starts at a multiple of this, so that any dtype can be viewed in place and copies are vectorised."""
DEFAULT_BUCKET_BYTES = 16 * 2**20
HALVES = 2


class SharedBuffer:
    """Anonymous memory that two processes map; whoever creates it passes the descriptor on to its child."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._view = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def create(cls) -> SharedBuffer:
        """New memory, of size 0."""
        return cls(os.memfd_create("oblr-weights", os.MFD_CLOEXEC))

    def reserve(self, size: int) -> None:
        """Make the memory at least this large; the other side maps it again afterwards."""
        if os.fstat(self.fd).st_size < size:
            os.ftruncate(self.fd, size)
        self.map()

    def map(self) -> None:
        """Map the whole memory as it is now."""
        size = os.fstat(self.fd).st_size
        if size > self._view.numel():
            self._view = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)

    @property
    def bytes(self) -> Tensor:
        """The mapped memory [size] uint8."""
        return self._view

    def checksum(self, start: int, used: int) -> int:
        """xxh3 over `used` bytes from `start` on; it takes less time than copying them."""
        return xxhash.xxh3_64_intdigest(self._view[start : start + used].numpy().data)

    def close(self) -> None:
        """Give the descriptor and the mapping back; the memory is freed when both sides have."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._view = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What lies in the shared memory now, in the words of the module's docstring."""

    specs: Manifest
    offsets: tuple[int, ...]  # of each tensor, in bytes
    start: int  # of the bucket
    used: int
    checksum: int


def bucket_capacity(manifest: Manifest, bucket_bytes: int) -> int:
    """Bytes of a bucket: the size asked for, or the largest tensor's, but never more than the whole model's."""
    sizes = [_aligned(spec.num_bytes) for spec in manifest]
    return _aligned(max(min(bucket_bytes, sum(sizes)), max(sizes, default=0)))


def fill_buckets(source: Source, capacity: int, buffer: SharedBuffer | None) -> Iterator[Bucket]:
    """Put a source's tensors into the buffer, bucket by bucket, in its halves by turns.

    The consumer resumes the iteration only when the engine is done with the bucket before the one it was given last.

    Args:
        source: iterated completely; collective where gathering its tensors is.
        capacity: bytes of a bucket; the buffer has HALVES times as many.
        buffer: None on a rank that feeds no engine: it gathers with the others and keeps nothing.

    Raises:
        WeightError: a tensor is larger than the capacity, which its manifest does not allow.
    """
    specs: list[TensorSpec] = []
    offsets: list[int] = [0]
    start = 0
    for name, tensor in source:
        spec = TensorSpec.of(name, tensor.dtype, tensor.shape)
        if spec.num_bytes > capacity:
            raise WeightError(f"{spec} does not fit a bucket of {capacity} bytes: it is larger than its manifest says")
        if offsets[-1] + spec.num_bytes > capacity:
            yield _seal(specs, offsets, start, buffer)
            specs, offsets, start = [], [0], (start + capacity) % (HALVES * capacity)
        if buffer is not None:
            _tensor(buffer, start + offsets[-1], spec).copy_(tensor.detach())
        specs.append(spec)
        offsets.append(offsets[-1] + _aligned(spec.num_bytes))
    if specs:
        yield _seal(specs, offsets, start, buffer)


def read_bucket(bucket: Bucket, buffer: SharedBuffer) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of the shared memory: copy them before the bucket is acknowledged.

    Raises:
        WeightError: the bytes are not those that were written.
    """
    if bucket.start + bucket.used > buffer.bytes.numel():
        raise WeightError(
            f"a bucket of {bucket.used} bytes at {bucket.start} is not within the {buffer.bytes.numel()} bytes shared"
        )
    found = buffer.checksum(bucket.start, bucket.used)
    if found != bucket.checksum:
        raise WeightError(f"a bucket's checksum is {found:016x}, the trainer's was {bucket.checksum:016x}")
    return [
        (spec.name, _tensor(buffer, bucket.start + offset, spec))
        for spec, offset in zip(bucket.specs, bucket.offsets, strict=True)
    ]


def _seal(specs: list[TensorSpec], offsets: list[int], start: int, buffer: SharedBuffer | None) -> Bucket:
    used = offsets[-2] + specs[-1].num_bytes
    checksum = 0
    if buffer is not None:
        for (begin, end), spec in zip(pairwise(offsets), specs, strict=True):
            # What lay between the tensors before would make the checksum depend on the last push.
            buffer.bytes[start + begin + spec.num_bytes : start + min(end, used)].zero_()
        checksum = buffer.checksum(start, used)
    return Bucket(tuple(specs), tuple(offsets[:-1]), start, used, checksum)


def _tensor(buffer: SharedBuffer, offset: int, spec: TensorSpec) -> Tensor:
    return buffer.bytes[offset : offset + spec.num_bytes].view(spec.torch_dtype).view(spec.shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
