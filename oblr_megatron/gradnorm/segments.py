"""Per-sample weight gradients from the two factors x and dy of a linear layer's backward. Pure functions.

    dW_i = sum over the tokens t of sample i of dy_t x_t^T

Samples are rows (padding tokens have dy = 0) or packed one after another. Sums are fp32 for fp32 and bf16 factors, fp64
for fp64 factors; squared norms are fp64. A value that is not finite affects only the result of its own sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from oblr_megatron.gradnorm.products import Method, Tiles, batch_sq_norms, product, sum_dtype, tiles_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Which tokens of a microbatch belong to which sample.

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

    def split(self, tokens: Tensor) -> Iterator[Tensor]:
        """Views [t_i, ...] of each sample's tokens in a factor [t, b, ...], or [tokens, h] if packed."""
        self.check(tokens)
        if self.cu_seqlens is None:
            yield from tokens.unbind(1)
            return
        flat = tokens if tokens.dim() == 2 else tokens[:, 0]
        for start, stop in pairwise(self.cu_seqlens):
            yield flat[start:stop]

    def index(self, tokens: int, device: torch.device) -> Tensor:
        """The sample of each token: [t, b] int64; packed [tokens, 1]."""
        numbers = torch.arange(self.num_samples, device=device)
        if self.cu_seqlens is None:
            return numbers.expand(tokens, -1)
        lengths = torch.tensor(self.cu_seqlens, device=device).diff()
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
    factors = list(zip(segments.split(x), segments.split(dy), strict=True))
    norms = torch.zeros(len(factors), dtype=torch.float64, device=x.device)
    lengths = [len(x_i) for x_i, _ in factors]
    for together in _batches(lengths, x.shape[-1] + dy.shape[-1], tiles_of(x)):
        if len(together) == 1:
            x_i, dy_i = factors[together[0]]
            norms[together[0]] = batch_sq_norms(x_i[None], dy_i[None], method)[0]
        else:
            xs, dys = ([factors[i][k] for i in together] for k in (0, 1))
            padded_x, padded_dy = pad_sequence(xs, batch_first=True), pad_sequence(dys, batch_first=True)
            norms[together] = batch_sq_norms(padded_x, padded_dy, method)
    return norms


def _batches(lengths: Sequence[int], width: int, tiles: Tiles) -> Iterator[list[int]]:
    """Group short packed samples of similar length into one padded call, to save kernel launches.

    Padding less than doubles a length. A group's padded factors fit in the memory of a tile. `width` is d + p. Samples
    without tokens are in no group.
    """
    similar: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        if length * length * width > tiles.call_flops:
            yield [index]
        elif length:
            similar.setdefault(1 << (length - 1).bit_length(), []).append(index)
    for padded, indices in similar.items():
        most = max(1, tiles.side**2 // (padded * width))
        yield from (indices[start : start + most] for start in range(0, len(indices), most))


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
        return grads.sum(dim=(0, *range(2, grads.dim() - 1)))
    assert len(grads) == segments.cu_seqlens[-1], f"{len(grads)} tokens for {segments}"
    sums = grads.new_empty(segments.num_samples, grads.shape[-1])
    for total, (start, stop) in zip(sums, pairwise(segments.cu_seqlens), strict=True):
        torch.sum(grads[start:stop].flatten(0, -2), dim=0, out=total)
    return sums


def row_grads(rows: Tensor, dy: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """Each sample's embedding gradient, at the rows of its own tokens.

    Args:
        rows: [b, t] int64, the row of each token; -1 if another rank holds it.
        dy: [b, t, h], gradient of the looked-up embeddings.
        segments: which tokens belong to which sample.

    Returns:
        sample [r] int64, row [r] int64, grad [r, h], sorted by (sample, row), each pair once.
    """
    held = rows.t() >= 0  # [t, b]
    sample, row = segments.index(len(held), rows.device)[held], rows.t()[held]
    stride = int(row.max()) + 1 if len(row) else 1
    key, place = torch.unique(sample * stride + row, return_inverse=True)
    grad = torch.zeros(len(key), dy.shape[-1], dtype=sum_dtype(dy), device=dy.device)
    grad.index_add_(0, place, dy.transpose(0, 1)[held].to(grad.dtype))
    return key // stride, key % stride, grad


def product_rows(x: Tensor, dy: Tensor, segments: Segments, sample: Tensor, row: Tensor) -> Tensor:
    """Selected rows of the samples' gradients: row `row[j]` of dy_i^T x_i with i = sample[j], for every j.

    With the rows that `row_grads` found, this is H in the cross term 2 <E, H> of a tied weight (embedding_rows.py).

    Args:
        x: [t, b, d], or [tokens, d] if packed.
        dy: [t, b, p], or [tokens, p] if packed.
        segments: which tokens belong to which sample.
        sample: [r] int64, ascending.
        row: [r] int64, in 0..p-1.

    Returns:
        [r, d].
    """
    out = torch.zeros(len(row), x.shape[-1], dtype=sum_dtype(x), device=x.device)
    assert bool((sample.diff() >= 0).all()), "the rows are not sorted by sample"
    counts = torch.bincount(sample, minlength=segments.num_samples).tolist()
    parts = zip(out.split(counts), row.split(counts), segments.split(x), segments.split(dy), strict=True)
    for out_i, row_i, x_i, dy_i in parts:
        product(x_i, dy_i[:, row_i], out_i)
    return out
