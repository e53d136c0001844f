"""||dy^T x||^2 of each of b samples of t tokens, the cheaper of two ways.

    direct: || sum_t dy_t x_t^T ||^2                 2 t p d FLOPs
    gram:   sum_{s,t} (x_s . x_t)(dy_s . dy_t)       t (t + strip)(p + d) FLOPs, the pairs s < t once

Both go in tiles, so that neither a gradient [p, d] nor a Gram matrix [t, t] is ever whole in memory. Products are
summed in fp32 (fp64 of fp64 factors), squares in fp64. The direct way is good to 1e-6 also where tokens all but cancel.
The error of the other is within 1e-7 of sum_{s,t} |x_s . x_t| |dy_s . dy_t|, little unless the norm is a small rest of
that; and its entries need the square of the factors' range: factors below 1e-19 count as 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor

Method = Literal["auto", "direct", "gram"]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes that suit a kind of device, and what there the work between matrix products costs."""

    side: int  # of a tile [side, side] of dy^T x
    strip: int  # tokens whose products with all earlier ones are made at once
    element_flops: int  # FLOPs of a matrix product in the time that squaring one entry of its result takes
    call_flops: int  # FLOPs in the time that one sample's kernels take to start


CPU_TILES = Tiles(side=512, strip=128, element_flops=64, call_flops=2**22)  # measured: fp32, one core, AVX-512
GPU_TILES = Tiles(side=4096, strip=512, element_flops=2048, call_flops=2**33)  # from an H100's data sheet: bf16


def tiles_of(tensor: Tensor) -> Tiles:
    """The sizes for the tensor's device."""
    return CPU_TILES if tensor.device.type == "cpu" else GPU_TILES


def sum_dtype(factor: Tensor) -> torch.dtype:
    """What sums of products are made in: fp64 for fp64, fp32 for everything else."""
    return torch.float64 if factor.dtype == torch.float64 else torch.float32


def widen(factor: Tensor) -> Tensor:
    """In a dtype that `multiply` takes: half precision is left to a GPU, whose matrix units sum it in fp32."""
    return factor if factor.is_cuda else factor.to(sum_dtype(factor))


def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right of widened [b, m, k] and [b, k, n], in out's dtype, that of the sum."""
    if left.dtype == out.dtype:
        torch.bmm(left, right, out=out)
    else:
        torch.bmm(left, right, out_dtype=out.dtype, out=out)


def product(x: Tensor, dy: Tensor, out: Tensor) -> None:
    """out [p, d] = dy^T x of [t, d] and [t, p]; summed in fp32 also where out is narrower."""
    sums = out if out.dtype == sum_dtype(x) else out.new_empty(out.shape, dtype=sum_dtype(x))
    multiply(widen(dy).t()[None], widen(x)[None], sums[None])
    if sums is not out:
        out.copy_(sums)


def cheaper(t: int, d: int, p: int, tiles: Tiles) -> Literal["direct", "gram"]:
    """The way that takes less time for t tokens: "gram" below about t = 2pd / (p + d) - strip."""
    direct = (2 * t + tiles.element_flops) * p * d
    gram = t * (t + min(t, tiles.strip)) * (p + d + tiles.element_flops)
    return "gram" if gram < direct else "direct"


def batch_sq_norms(x: Tensor, dy: Tensor, method: Method = "auto") -> Tensor:
    """||dy_i^T x_i||^2: x [b, t, d], dy [b, t, p], of one dtype -> [b] fp64."""
    (b, t, d), p = x.shape, dy.shape[2]
    assert dy.shape[:2] == (b, t) and dy.dtype == x.dtype, f"x {x.dtype} {x.shape}, dy {dy.dtype} {dy.shape}"
    norms = torch.zeros(b, dtype=torch.float64, device=x.device)
    if 0 in (b, t, d, p):
        return norms
    tiles = tiles_of(x)
    if method == "auto":
        method = cheaper(t, d, p, tiles)
    add = _add_direct if method == "direct" else _add_gram
    add(norms, widen(x), widen(dy), tiles)
    return norms


def _add_direct(norms: Tensor, x: Tensor, dy: Tensor, tiles: Tiles) -> None:
    """norms [b] += the squares of all tiles of dy^T x, of as many samples at once as fill a tile."""
    d, p = x.shape[2], dy.shape[2]
    height, width = min(p, tiles.side), min(d, tiles.side)
    step = min(len(x), max(1, tiles.side**2 // (height * width)))
    tile = _Tile(step * height * width, x)
    for samples in _slices(len(x), step):
        for rows in _slices(p, height):
            for columns in _slices(d, width):
                grad = tile.multiply(dy[samples, :, rows].transpose(1, 2), x[samples, :, columns])
                norms[samples] += tile.times(grad, grad).sum(dim=(1, 2))


def _add_gram(norms: Tensor, x: Tensor, dy: Tensor, tiles: Tiles) -> None:
    """norms [b] += the products of the Gram matrices' entries, each strip of tokens with itself and all before it."""
    t = x.shape[1]
    height = min(t, tiles.strip)
    step = min(len(x), max(1, tiles.side**2 // (height * t)))
    inputs, outputs = _Tile(step * height * t, x), _Tile(step * height * t, dy)
    for samples in _slices(len(x), step):
        for strip in _slices(t, height):
            before = slice(0, strip.stop)
            pairs = inputs.times(
                inputs.multiply(x[samples, strip], x[samples, before].transpose(1, 2)),
                outputs.multiply(dy[samples, strip], dy[samples, before].transpose(1, 2)),
            )  # [samples, strip, before]
            once, twice = pairs[:, :, strip.start :], pairs[:, :, : strip.start]
            norms[samples] += once.sum(dim=(1, 2)) + 2.0 * twice.sum(dim=(1, 2))


class _Tile:
    """Memory for one product and its squares, used over and over: fresh pages cost more than the sums."""

    def __init__(self, numel: int, factor: Tensor) -> None:
        self._sums = torch.empty(numel, dtype=sum_dtype(factor), device=factor.device)
        self._squares = torch.empty(numel, dtype=torch.float64, device=factor.device)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """left @ right: [b, m, k] and [b, k, n]."""
        out = _front(self._sums, (len(left), left.shape[1], right.shape[2]))
        multiply(left, right, out)
        return out

    def times(self, left: Tensor, right: Tensor) -> Tensor:
        """Entry by entry, in fp64."""
        return _front(self._squares, left.shape).copy_(left).mul_(right)


def _front(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return memory[:count].view(shape)


def _slices(stop: int, step: int) -> Iterator[slice]:
    """0..stop in steps, the last of them cut by what it is applied to."""
    for start in range(0, stop, step):
        yield slice(start, start + step)
