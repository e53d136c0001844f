"""The data plane of a push on one machine without CUDA: flat buckets of tensors in anonymous shared memory.

The memory is a memfd that the engine process inherits: it has no name, so nothing is left in /dev/shm however either
side ends. It has two halves. The trainer fills one with a bucket and announces it; while the engine copies the tensors
out, it gathers the next bucket into the other half, and waits for the engine before it goes back to the first. So every
byte is copied once on each side, and cast on the way where the trainer's weights are wider; buckets that fit the
processor's cache are checked and copied from there. A bucket carries a checksum over its bytes; the engine refuses one
whose bytes have another. A tensor that is larger than a bucket is spread over several.

A bucket of a 3 x 2 fp32 and a 5-element bf16 tensor, offsets in bytes from where it starts:

    |0 ......... 23|24 .. 63|64 .... 73|     all of ("a", float32, [3, 2]), all of ("b", bfloat16, [5])
    | a            | unused | b        |     offsets 0, 64;  used 74
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import xxhash
from torch import Tensor

from oblr_megatron.errors import DamagedError, WeightError
from oblr_megatron.weights.manifest import Manifest, Part, Source, manifest_of, views_of

ALIGNMENT = 64
"""Every tensor starts at a multiple of this, so that any dtype can be viewed in place and copies are vectorised."""
DEFAULT_BUCKET_BYTES = 8 * 2**20
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

    parts: tuple[Part, ...]
    offsets: tuple[int, ...]  # of each part, in bytes
    start: int  # of the bucket
    used: int
    checksum: int | None  # None: not taken

    def update_info(self) -> dict[str, Any]:
        """The bucket's description as plain lists; the first three keys are those of vLLM's own backends."""
        specs = [part.spec for part in self.parts]
        return {
            "names": [spec.name for spec in specs],
            "dtype_names": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "firsts": [part.first for part in self.parts],
            "counts": [part.count for part in self.parts],
            "offsets": list(self.offsets),
            "start": self.start,
            "used": self.used,
            "checksum": self.checksum,
        }


def bucket_capacity(manifest: Manifest, bucket_bytes: int) -> int:
    """Bytes of a bucket: the size asked for, but never more than the whole model's."""
    return _aligned(min(bucket_bytes, sum(_aligned(spec.num_bytes) for spec in manifest)))


def fill_buckets(
    source: Source, capacity: int, buffer: SharedBuffer | None, *, checksum: bool = True
) -> Iterator[Bucket]:
    """Put a source's tensors into the buffer, bucket by bucket, in its halves by turns.

    The consumer resumes the iteration only when the engine is done with the bucket before the one it was given last.

    Args:
        source: iterated completely; collective where gathering its tensors is.
        capacity: bytes of a bucket; the buffer has HALVES times as many.
        buffer: None on a rank that feeds no engine: it gathers with the others and keeps nothing.
        checksum: take each bucket's.

    Raises:
        WeightError: the source does not yield what its metadata declares.
    """
    # Taken once: if the engine dies and its buffer is closed, the rest is gathered into memory that no one reads.
    memory = None if buffer is None else buffer.bytes
    parts: list[Part] = []
    offsets: list[int] = [0]
    start = 0
    for part, piece in _pieces(source, capacity):
        if offsets[-1] + part.num_bytes > capacity:
            yield _seal(parts, offsets, start, buffer, checksum)
            parts, offsets, start = [], [0], (start + capacity) % (HALVES * capacity)
        if memory is not None:
            _elements(memory, start + offsets[-1], part).view(piece.shape).copy_(piece)
        parts.append(part)
        offsets.append(offsets[-1] + _aligned(part.num_bytes))
    if parts:
        yield _seal(parts, offsets, start, buffer, checksum)


def read_bucket(bucket: Bucket, buffer: SharedBuffer) -> list[tuple[Part, Tensor]]:
    """The contents of a bucket [count], as views of the shared memory: copy them before the bucket is acknowledged.

    Raises:
        DamagedError: the bytes are not those that were written.
        WeightError: the bucket is not within the memory.
    """
    if bucket.start + bucket.used > buffer.bytes.numel():
        raise WeightError(
            f"a bucket of {bucket.used} bytes at {bucket.start} is not within the {buffer.bytes.numel()} bytes shared"
        )
    if bucket.checksum is not None:
        found = buffer.checksum(bucket.start, bucket.used)
        if found != bucket.checksum:
            names = f"{bucket.parts[0].spec.name} ... {bucket.parts[-1].spec.name}"
            raise DamagedError(
                f"a bucket's checksum is {found:016x}, the trainer's was {bucket.checksum:016x} ({names})"
            )
    return [
        (part, _elements(buffer.bytes, bucket.start + offset, part))
        for part, offset in zip(bucket.parts, bucket.offsets, strict=True)
    ]


def _pieces(source: Source, capacity: int) -> Iterator[tuple[Part, Tensor]]:
    """Every tensor in pieces that fit a bucket; a piece has as many elements as its part, in any number of dimensions.

    Raises:
        WeightError: as `fill_buckets`.
    """
    manifest = manifest_of(source)
    stream = views_of(source)
    for spec in manifest:
        name, view = next(stream, ("nothing more", torch.empty(0)))
        if name != spec.name or view.numel() != spec.numel:
            raise WeightError(f"the source yields {name} {list(view.shape)} where its metadata declares {spec}")
        first = 0
        for piece in _blocks(view.detach(), max(1, capacity // spec.torch_dtype.itemsize)):
            yield Part(spec, first, piece.numel()), piece
            first += piece.numel()
    for name, _ in stream:
        raise WeightError(f"the source yields {name} after all that its metadata declares")


def _blocks(view: Tensor, most: int) -> Iterator[Tensor]:
    """Cut a tensor into stretches of at most `most` elements, in row-major order.

    Example: [3, 4, 5], most 8 -> each [4, 5] in turn -> two of 8 elements and one of 4 where it is contiguous.
    """
    if view.numel() <= most:
        yield view
    elif view.is_contiguous():
        yield from view.view(-1).split(most)
    elif (row := view[0].numel()) <= most:
        yield from view.split(most // row)
    else:
        for inner in view:
            yield from _blocks(inner, most)


def _seal(parts: list[Part], offsets: list[int], start: int, buffer: SharedBuffer | None, checksum: bool) -> Bucket:
    used = offsets[-2] + parts[-1].num_bytes
    found = None
    if buffer is not None and checksum:
        for (begin, end), part in zip(pairwise(offsets), parts, strict=True):
            # What lay between the tensors before would make the checksum depend on the last push.
            gap = buffer.bytes[start + begin + part.num_bytes : start + min(end, used)]
            if len(gap):
                gap.zero_()
        found = buffer.checksum(start, used)
    return Bucket(tuple(parts), tuple(offsets[:-1]), start, used, found)


def _elements(memory: Tensor, offset: int, part: Part) -> Tensor:
    return memory[offset : offset + part.num_bytes].view(part.spec.torch_dtype)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
