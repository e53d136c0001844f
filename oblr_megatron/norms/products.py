"""||dy^T x||^2 of each of b samples of t tokens, by the cheaper of two methods.

    direct: || sum_t dy_t x_t^T ||^2                 2 t p d FLOPs
    gram:   sum_{s,t} (x_s . x_t)(dy_s . dy_t)       t (t + strip)(p + d) FLOPs, each pair s < t once

Both work in tiles: neither a gradient [p, d] nor a Gram matrix [t, t] is ever whole in memory. Products are summed in
fp32 (fp64 for fp64 factors), squares in fp64.

Accuracy: "direct" has a relative error of 1e-6, even if the tokens nearly cancel. The error of "gram" is at most 1e-7
of sum_{s,t} |x_s . x_t| |dy_s . dy_t|, which is large relative to the norm if the tokens nearly cancel. "gram" squares
the range of the factors, so that factors below 1e-19 underflow to 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

import torch

from oblr_megatron.memory.buffer_sizes import CPU_TILE_SIDE, GPU_TILE_SIDE

if TYPE_CHECKING:
    from torch import Tensor

Method = Literal["auto", "direct", "gram"]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes for a kind of device, and its overheads in units of matrix-product FLOPs."""

    side: int  # a tile of dy^T x is [side, side]
    strip: int  # tokens that are multiplied with all earlier ones in one call
    element_flops: int  # FLOPs that take as long as squaring one entry of the result
    call_flops: int  # FLOPs that take as long as launching one sample's kernels


CPU_TILES = Tiles(CPU_TILE_SIDE, strip=128, element_flops=64, call_flops=2**22)  # measured: fp32, one core, AVX-512
GPU_TILES = Tiles(GPU_TILE_SIDE, strip=512, element_flops=2048, call_flops=2**33)  # H100 data sheet: bf16


def tiles_of(tensor: Tensor) -> Tiles:
    """The tiles for the tensor's device."""
    return CPU_TILES if tensor.device.type == "cpu" else GPU_TILES


def sum_dtype(factor: Tensor) -> torch.dtype:
    """The dtype of sums of products: fp64 for fp64 factors, else fp32."""
    return torch.float64 if factor.dtype == torch.float64 else torch.float32


def widen(factor: Tensor) -> Tensor:
    """Convert to a dtype that `multiply` takes. A GPU keeps half precision: its matrix units sum in fp32."""
    return factor if factor.is_cuda else factor.to(sum_dtype(factor))


def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right for widened [b, m, k] and [b, k, n], summed in out's dtype."""
    if left.dtype == out.dtype:
        torch.bmm(left, right, out=out)
    else:
        torch.bmm(left, right, out_dtype=out.dtype, out=out)


def product(x: Tensor, dy: Tensor, out: Tensor) -> None:
    """out [p, d] = dy^T x for x [t, d] and dy [t, p]; summed in fp32 even if out is narrower."""
    sums = out if out.dtype == sum_dtype(x) else out.new_empty(out.shape, dtype=sum_dtype(x))
    multiply(widen(dy).t()[None], widen(x)[None], sums[None])
    if sums is not out:
        out.copy_(sums)


def product_of_gradient(x: Tensor, dy: Tensor, out: Tensor) -> None:
    """`product` as `taps.add_product` forms it: half precision on a CPU is rounded once more, and twice as fast."""
    if x.is_cuda or x.dtype == out.dtype:
        product(x, dy, out)
    else:
        out.copy_(dy.t() @ x)


def wants_product(t: int, d: int, p: int, factor: Tensor) -> bool:
    """Whether squaring a product that the gradient needs anyway is faster than the Gram form.

    On a CPU the Gram form widens half precision, and the product does not: it is faster from shorter samples on
    (measured with 576 to 3,072 features: from 125 tokens, fp32 from 170).
    """
    tiles = tiles_of(factor)
    wide = factor.is_cuda or factor.dtype == sum_dtype(factor)
    entry = (2 if wide else 1) * tiles.element_flops
    return entry * p * d < t * (t + min(t, tiles.strip)) * (p + d + tiles.element_flops)


def tile_rows(factor: Tensor) -> int:
    """Rows of a product [p, d] that are formed at a time, for a factor [t, d]."""
    return max(1, tiles_of(factor).side ** 2 // factor.shape[-1])


def cheaper(t: int, d: int, p: int, tiles: Tiles) -> Literal["direct", "gram"]:
    """The faster method for t tokens: "gram" below about t = 2pd / (p + d) - strip."""
    direct = (2 * t + tiles.element_flops) * p * d
    gram = t * (t + min(t, tiles.strip)) * (p + d + tiles.element_flops)
    return "gram" if gram < direct else "direct"


def batch_sq_norms(x: Tensor, dy: Tensor, method: Method = "auto") -> Tensor:
    """||dy_i^T x_i||^2 for x [b, t, d] and dy [b, t, p] of one dtype -> [b] fp64."""
    (b, t, d), p = x.shape, dy.shape[2]
    assert dy.shape[:2] == (b, t) and dy.dtype == x.dtype, f"x {x.dtype} {x.shape}, dy {dy.dtype} {dy.shape}"
    norms = torch.zeros(b, dtype=torch.float64, device=x.device)
    if 0 in (b, t, d, p):
        return norms
    tiles = tiles_of(x)
    if method == "auto":
        method = cheaper(t, d, p, tiles)
    x, dy = widen(x), widen(dy)
    if method == "direct":
        _add_direct(norms, x, dy, tiles)
    elif t <= tiles.strip and b * t * t <= tiles.side**2:  # in one tile, without the preparations for several
        pairs = _square(x).to(torch.float64).mul_(_square(dy))
        norms = pairs.sum(dim=(1, 2))
    else:
        _add_gram(norms, x, dy, tiles)
    return norms.clamp_(min=0)  # the Gram form of a gradient near 0 may round to a negative sum


def _square(factor: Tensor) -> Tensor:
    """The products of all pairs of tokens: [b, t, h] -> [b, t, t]."""
    out = factor.new_empty(len(factor), factor.shape[1], factor.shape[1], dtype=sum_dtype(factor))
    multiply(factor, factor.transpose(1, 2), out)
    return out


def _add_direct(norms: Tensor, x: Tensor, dy: Tensor, tiles: Tiles) -> None:
    """norms [b] += the squares of all tiles of dy^T x, for as many samples at once as fill a tile."""
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
    """norms [b] += the products of the two Gram matrices, each strip of tokens with itself and all earlier tokens."""
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
    """Reused memory for one product and its squares: allocating fresh pages would cost more than the sums."""

    def __init__(self, numel: int, factor: Tensor) -> None:
        self._sums = torch.empty(numel, dtype=sum_dtype(factor), device=factor.device)
        self._squares = torch.empty(numel, dtype=torch.float64, device=factor.device)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """left @ right: [b, m, k] and [b, k, n]."""
        out = _front(self._sums, (len(left), left.shape[1], right.shape[2]))
        multiply(left, right, out)
        return out

    def times(self, left: Tensor, right: Tensor) -> Tensor:
        """left * right, elementwise in fp64."""
        return _front(self._squares, left.shape).copy_(left).mul_(right)


def _front(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    return memory[: prod(shape)].view(shape)


def _slices(stop: int, step: int) -> Iterator[slice]:
    """Slices of `step` that cover 0..stop; the last may reach past the end."""
    for start in range(0, stop, step):
        yield slice(start, start + step)
