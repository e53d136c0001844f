"""Per-sample weight gradients from the two factors x and dy of a linear layer's backward. Pure functions.

    dW_i = sum over the tokens t of sample i of dy_t x_t^T

Samples are rows (padding tokens have dy = 0) or packed one after another. Sums are fp32 for fp32 and bf16 factors, fp64
for fp64 factors; squared norms are fp64. A value that is not finite affects only the result of its own sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from oblr_megatron.norms.products import (
    Method,
    Tiles,
    batch_sq_norms,
    multiply,
    product,
    sum_dtype,
    tiles_of,
    widen,
)
from oblr_megatron.runtime.device_copy import to_device

if TYPE_CHECKING:
    from torch import Tensor


ROWS = 2**32
"""More than the rows of any embedding."""
VIEWED = 8
"""A run with at least so many samples gets its own call. The samples of smaller runs are copied into padded calls."""


@dataclass(frozen=True, slots=True)
class SampleRun:
    """Neighbouring packed samples of equal length: one tensor operation treats them all, without a copy.

    Microbatches are packed longest first, so that equal lengths are neighbours.
    """

    first: int  # sample
    num_samples: int
    start: int  # token
    length: int

    @property
    def samples(self) -> slice:
        """The samples, as a slice."""
        return slice(self.first, self.first + self.num_samples)

    def of(self, tokens: Tensor) -> Tensor:
        """A view [samples, length, ...] of a tensor [tokens, ...]."""
        return tokens[self.start : self.start + self.num_samples * self.length].view(
            self.num_samples, self.length, *tokens.shape[1:]
        )


@dataclass(frozen=True)
class Segments:
    """The tokens of each sample in a microbatch.

    Example, two samples of 4 and 2 tokens:
        packed   Segments(2, (0, 4, 6)), factors [6, 1, d] or [6, d]
        rows     Segments(2, None),      factors [4, 2, d]
    """

    num_samples: int
    cu_seqlens: tuple[int, ...] | None  # packed: sample i is tokens cu_seqlens[i]..cu_seqlens[i + 1]; None: column i

    def __post_init__(self) -> None:
        offsets = self.cu_seqlens
        if offsets is not None:
            assert len(offsets) == self.num_samples + 1, f"{len(offsets)} offsets for {self.num_samples} samples"
            assert offsets[0] == 0 and list(offsets) == sorted(offsets), f"offsets {offsets} do not rise from 0"

    @cached_property
    def runs(self) -> tuple[SampleRun, ...]:
        """The packed samples in runs of equal length."""
        assert self.cu_seqlens is not None, "rows are no runs"
        lengths = [stop - start for start, stop in pairwise(self.cu_seqlens)]
        runs, first = [], 0
        for length, run in groupby(lengths):
            samples = len(list(run))
            runs.append(SampleRun(first, samples, self.cu_seqlens[first], length))
            first += samples
        return tuple(runs)

    def split(self, tokens: Tensor) -> Iterator[Tensor]:
        """Views [t_i, ...] of each sample's tokens in a factor [t, b, ...], or [tokens, h] if packed."""
        if self.cu_seqlens is None:
            self.check(tokens)
            yield from tokens.unbind(1)
            return
        flat = self.flat(tokens)
        for start, stop in pairwise(self.cu_seqlens):
            yield flat[start:stop]

    def flat(self, tokens: Tensor) -> Tensor:
        """A packed factor [tokens, 1, h] or [tokens, h] as [tokens, h]."""
        self.check(tokens)
        return tokens if tokens.dim() == 2 else tokens[:, 0]

    def index(self, tokens: int, device: torch.device) -> Tensor:
        """The sample of each token: [t, b] int64; packed [tokens, 1]."""
        numbers = torch.arange(self.num_samples, device=device)
        if self.cu_seqlens is None:
            return numbers.expand(tokens, -1)
        lengths = to_device(torch.tensor(self.cu_seqlens).diff(), device)
        return numbers.repeat_interleave(lengths, output_size=tokens)[:, None]

    def check(self, tokens: Tensor) -> None:
        """Assert that a factor [t, b, ...], or [tokens, h] if packed, has these samples' shape."""
        if self.cu_seqlens is None:
            fits = tokens.dim() > 2 and tokens.shape[1] == self.num_samples
        else:
            fits = (tokens.dim() == 2 or tokens.shape[1] == 1) and len(tokens) == self.cu_seqlens[-1]
        assert fits, f"a factor of shape {tuple(tokens.shape)} does not fit {self}"


def product_sq_norms(x: Tensor, dy: Tensor, segments: Segments, *, method: Method = "auto") -> Tensor:
    """||dy_i^T x_i||^2 of each sample i; no gradient [p, d] is ever whole in memory.

    Args:
        x: [t, b, d], or [tokens, d] if packed.
        dy: [t, b, p], or [tokens, p] if packed.
        segments: which tokens belong to which sample.
        method: "direct" computes dy_i^T x_i, "gram" sums (x_s . x_t)(dy_s . dy_t) over pairs of tokens, "auto" takes
            the cheaper one for each sample's shape.

    Returns:
        [n] fp64; 0 for a sample without tokens.
    """
    if segments.cu_seqlens is None:
        segments.check(x)
        segments.check(dy)
        return batch_sq_norms(x.transpose(0, 1), dy.transpose(0, 1), method)
    x, dy = segments.flat(x), segments.flat(dy)
    if segments.num_samples == 1:
        return batch_sq_norms(x[None], dy[None], method)
    norms = torch.zeros(segments.num_samples, dtype=torch.float64, device=x.device)
    width, tiles = x.shape[-1] + dy.shape[-1], tiles_of(x)
    few: dict[int, list[Tensor]] = {}  # short samples without many neighbours of their length: [x_i, dy_i]
    for run in segments.runs:
        if run.num_samples >= VIEWED or run.length * run.length * width > tiles.call_flops:
            norms[run.samples] = batch_sq_norms(run.of(x), run.of(dy), method)
        elif run.length:
            pairs = zip(run.of(x).unbind(), run.of(dy).unbind(), strict=True)
            few |= {run.first + number: list(pair) for number, pair in enumerate(pairs)}
    for together in _padded_calls({sample: len(x_i) for sample, (x_i, _) in few.items()}, width, tiles):
        xs, dys = (pad_sequence([few[sample][k] for sample in together], batch_first=True) for k in (0, 1))
        norms.index_copy_(0, to_device(torch.tensor(together), x.device), batch_sq_norms(xs, dys, method))
    return norms


def _padded_calls(lengths: Mapping[int, int], width: int, tiles: Tiles) -> Iterator[list[int]]:
    """Group samples of similar length into one padded call, to save kernel launches.

    Padding less than doubles a length. A group's padded factors fit in the memory of a tile. `width` is d + p.
    """
    similar: dict[int, list[int]] = {}
    for sample, length in lengths.items():
        similar.setdefault(1 << (length - 1).bit_length(), []).append(sample)
    for padded, samples in similar.items():
        most = max(1, tiles.side**2 // (padded * width))
        yield from (samples[start : start + most] for start in range(0, len(samples), most))


def sample_products(x: Tensor, dy: Tensor, segments: Segments) -> Iterator[tuple[int, Tensor]]:
    """(i, dy_i^T x_i [p, d]) for every sample in turn; zeros for a sample without tokens.

    All products share one buffer: use each before taking the next. Arguments as in `product_sq_norms`.
    """
    out = torch.empty(dy.shape[-1], x.shape[-1], dtype=sum_dtype(x), device=x.device)
    for index, (x_i, dy_i) in enumerate(zip(segments.split(x), segments.split(dy), strict=True)):
        product(x_i, dy_i, out)
        yield index, out


def scale_grads(terms: Tensor, segments: Segments) -> Tensor:
    """Sum of the terms over each sample's tokens and heads: [t, b, ..., h] -> [n, h].

    Packed terms may lack the dimension b = 1.
    """
    grads = terms.to(sum_dtype(terms))
    if segments.cu_seqlens is None:
        segments.check(grads)
        sums = grads.sum(dim=0)  # heads come after tokens: one sum over both is far slower on a CPU
        return sums if sums.dim() == 2 else sums.flatten(1, -2).sum(dim=1)
    assert len(grads) == segments.cu_seqlens[-1], f"{len(grads)} tokens for {segments}"
    sums = grads.new_empty(segments.num_samples, grads.shape[-1])
    for run in segments.runs:
        torch.sum(run.of(grads).flatten(1, -2), dim=1, out=sums[run.samples])
    return sums


def row_grads(rows: Tensor, dy: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """Each sample's embedding gradient, at the rows of its own tokens; no size depends on the tokens.

    Args:
        rows: [b, t] int64, the row of each token; -1 if another rank holds it.
        dy: [b, t, h], gradient of the looked-up embeddings.
        segments: which tokens belong to which sample.

    Returns:
        sample [b t] int64, row [b t] int64, grad [b t, h], sorted by (sample, row), each pair once. Then follow sample
        0, row 0 and zeros, because several tokens are the same, or another rank's.
    """
    none = torch.iinfo(torch.int64).max
    keys = segments.index(rows.shape[1], rows.device) * ROWS + rows.t()  # [t, b]
    keys = keys.masked_fill_(rows.t() < 0, none).flatten()
    ascending, order = keys.sort()
    place = torch.zeros_like(order)
    place[1:] = (ascending.diff() != 0).cumsum(0)
    pairs = torch.full_like(keys, none).scatter_(0, place, ascending)
    grad = torch.zeros(len(keys), dy.shape[-1], dtype=sum_dtype(dy), device=dy.device)
    place = torch.empty_like(order).scatter_(0, order, place)  # of the tokens in their own order
    grad.index_add_(0, place, dy.transpose(0, 1).flatten(0, 1).to(grad.dtype))
    absent = pairs == none
    pairs = pairs.masked_fill_(absent, 0)
    return pairs // ROWS, pairs % ROWS, grad.masked_fill_(absent[:, None], 0.0)


def product_rows(x: Tensor, dy: Tensor, segments: Segments, sample: Tensor, row: Tensor) -> Tensor:
    """Selected rows of the samples' gradients: row `row[j]` of dy_i^T x_i with i = sample[j], for every j.

    With the rows of `row_grads`, this is H in the cross term 2 <E, H> of a tied weight (embedding_rows.py).

    Args:
        x: [t, b, d], or [tokens, d] if packed.
        dy: [t, b, p], or [tokens, p] if packed.
        segments: which tokens belong to which sample.
        sample: [r] int64, ascending, in host memory.
        row: [r] int64, in 0..p-1, in host memory.

    Returns:
        [r, d].
    """
    out = torch.zeros(len(row), x.shape[-1], dtype=sum_dtype(x), device=x.device)
    assert bool((sample.diff() >= 0).all()), "the rows are not sorted by sample"
    counts = torch.bincount(sample, minlength=segments.num_samples)
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[sample]  # among its sample's rows
    numbers, end = counts.tolist(), 0
    for first, xs, dys in _alike(x, dy, segments):
        most = max(numbers[first : first + len(xs)])
        step = max(1, tiles_of(x).side ** 2 // (xs.shape[1] * most + 1))  # samples a call: `columns` fits in a tile
        for start in range(first, first + len(xs), step):
            some_x, some_dy = (part[start - first : start - first + step] for part in (xs, dys))
            begin, end = end, end + sum(numbers[start : start + len(some_x)])
            entry = (sample[begin:end] - start) * most + place[begin:end]
            rows = row.new_zeros(len(some_x) * most).index_copy_(0, entry, row[begin:end]).view(len(some_x), most)
            rows, entry = to_device(rows, x.device), to_device(entry, x.device)
            columns = some_dy.gather(2, rows[:, None].expand(-1, xs.shape[1], -1))  # [samples, t, most]
            products = out.new_empty(len(some_x), most, x.shape[-1])
            multiply(widen(columns).transpose(1, 2), widen(some_x), products)
            out[begin:end] = products.flatten(0, 1).index_select(0, entry)
    return out


def _alike(x: Tensor, dy: Tensor, segments: Segments) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Neighbouring samples of equal length: the first one's number, x [samples, t, d], and dy [samples, t, p]."""
    if segments.cu_seqlens is not None:
        x, dy = segments.flat(x), segments.flat(dy)
        yield from ((run.first, run.of(x), run.of(dy)) for run in segments.runs)
    elif segments.num_samples:
        yield 0, x.transpose(0, 1), dy.transpose(0, 1)
