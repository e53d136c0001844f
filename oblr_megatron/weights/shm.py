"""Transport of a push on one machine without CUDA: flat buckets of tensors in anonymous shared memory.

The memory is a memfd that the engine process inherits. It has no name, so nothing is left in /dev/shm however either
side ends. It has two halves: while the engine copies a bucket out of one half, the trainer gathers the next bucket into
the other. The trainer waits for the engine before it reuses a half. Each byte is copied once on each side, and cast on
the way if the trainer's weights are wider. Buckets that fit the processor's cache are checked and copied from there. A
bucket has a checksum of its bytes, which the engine compares. A tensor larger than a bucket is spread over several.

A bucket with a 3 x 2 fp32 tensor and a 5-element bf16 tensor; offsets in bytes from the bucket's start:

    |0 ......... 23|24 .. 63|64 .... 73|     all of ("a", float32, [3, 2]), all of ("b", bfloat16, [5])
    | a            | unused | b        |     offsets 0, 64;  used 74
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import xxhash
from torch import Tensor

from oblr_megatron.errors import DamagedError, WeightError
from oblr_megatron.weights.manifest import Manifest, Part, Source, manifest_of

ALIGNMENT = 64
"""Every tensor starts at a multiple of this, so any dtype can be viewed in place and copies are vectorised."""
HALVES = 2
DAMAGED = "a bucket's checksum is"
"""vLLM passes only the text of an error from its worker processes to the engine, which finds damage by these words."""


class SharedBuffer:
    """Anonymous memory that two processes map; the creator passes the descriptor to its child process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._view = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def create(cls) -> SharedBuffer:
        """New memory, of size 0."""
        return cls(os.memfd_create("oblr-weights", os.MFD_CLOEXEC))

    def reserve(self, size: int) -> None:
        """Make the memory at least this large; the other side must map it again."""
        if os.fstat(self.fd).st_size < size:
            os.ftruncate(self.fd, size)
        self.map()

    def map(self) -> None:
        """Map the whole memory in its current size."""
        size = os.fstat(self.fd).st_size
        if size > self._view.numel():
            self._view = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)

    @property
    def bytes(self) -> Tensor:
        """The mapped memory [size] uint8."""
        return self._view

    def checksum(self, start: int, used: int) -> int:
        """xxh3 of `used` bytes from `start` on; faster than copying them."""
        return xxhash.xxh3_64_intdigest(self._view[start : start + used].numpy().data)

    def close(self) -> None:
        """Close the descriptor and the mapping; the memory is freed when both sides have done so."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._view = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket in the shared memory; the module's docstring has an example."""

    parts: tuple[Part, ...]
    offsets: tuple[int, ...]  # of each part, in bytes
    start: int  # of the bucket
    used: int
    checksum: int | None  # None: not taken
    error: Exception | None = None  # the checksum's error, kept so that the rank still gathers with the others

    def update_info(self) -> dict[str, Any]:
        """The bucket's description as plain lists; the first three keys are those of vLLM's own backends.

        Raises:
            Exception: the checksum could not be computed.
        """
        if self.error is not None:
            raise self.error
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
    """Bytes of a bucket: the requested size, but at most the whole model's."""
    return _aligned(min(bucket_bytes, sum(_aligned(spec.num_bytes) for spec in manifest)))


def fill_buckets(
    source: Source, capacity: int, buffer: SharedBuffer | None, *, checksum: bool = True
) -> Iterator[Bucket]:
    """Copy a source's tensors into the buffer, bucket by bucket, alternating between its halves.

    Before you take the next bucket, wait until the engine has loaded every bucket except the latest.

    Args:
        source: iterated completely; collective where gathering its tensors is.
        capacity: bytes of a bucket; the buffer has HALVES times as many.
        buffer: None on a rank that sends to no engine: it gathers with the others and keeps nothing.
        checksum: compute each bucket's checksum.

    Raises:
        WeightError: the source yields other tensors than its metadata declares.
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
    """The parts of a bucket with their elements [count], as views of the shared memory: copy them before you answer.

    Raises:
        DamagedError: the bytes differ from those that were written.
        WeightError: the bucket exceeds the memory.
    """
    if bucket.start + bucket.used > buffer.bytes.numel():
        raise WeightError(
            f"a bucket of {bucket.used} bytes at {bucket.start} exceeds the memory of {buffer.bytes.numel()} bytes"
        )
    if bucket.checksum is not None:
        compare_checksums(buffer.checksum(bucket.start, bucket.used), bucket.checksum, bucket.parts)
    return [
        (part, _elements(buffer.bytes, bucket.start + offset, part))
        for part, offset in zip(bucket.parts, bucket.offsets, strict=True)
    ]


def compare_checksums(received: int, sent: int, parts: Sequence[Part]) -> None:
    """Compare a bucket's checksum with the trainer's.

    Raises:
        DamagedError: they differ. The text starts with `DAMAGED`.
    """
    if received != sent:
        names = f"{parts[0].spec.name} ... {parts[-1].spec.name}"
        raise DamagedError(f"{DAMAGED} {received:016x}, the trainer's was {sent:016x} ({names})")


def _pieces(source: Source, capacity: int) -> Iterator[tuple[Part, Tensor]]:
    """Every tensor in pieces that fit a bucket; a piece may have any number of dimensions.

    Raises:
        WeightError: see `fill_buckets`.
    """
    manifest = manifest_of(source)
    views = getattr(source, "views", None)
    stream: Iterator[tuple[str, Tensor]] = iter(source) if views is None else views()
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
    """Cut a tensor into blocks of at most `most` consecutive elements, in row-major order.

    Example: [3, 4, 5] with most=8 -> for each of the three [4, 5]: 8, 8 and 4 elements if it is contiguous.
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
    digest, failure = None, None
    if buffer is not None and checksum:
        for (begin, end), part in zip(pairwise(offsets), parts, strict=True):
            # Old bytes between the tensors would make the checksum depend on the last push.
            gap = buffer.bytes[start + begin + part.num_bytes : start + min(end, used)]
            if len(gap):
                gap.zero_()
        try:
            digest = buffer.checksum(start, used)
        except Exception as error:  # noqa: BLE001  any error: a GPU may lack memory; `update_info` raises it
            failure = error
    return Bucket(tuple(parts), tuple(offsets[:-1]), start, used, digest, failure)


def _elements(memory: Tensor, offset: int, part: Part) -> Tensor:
    return memory[offset : offset + part.num_bytes].view(part.spec.torch_dtype)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
