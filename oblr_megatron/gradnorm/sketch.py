"""Squared norms of weight gradients, estimated without bias from small random projections.

    S_i = P dW_i Q^T = sum_t (P dy_t)(Q x_t)^T          P [m, p], Q [m, d], entries +-1 / sqrt(m), E P^T P = E Q^T Q = 1
    E ||S_i||^2 = ||dW_i||^2

at 2 t m (p + d) FLOPs instead of 2 t p d. S_i is linear in dW_i: summands of it on several ranks, with the same P and
Q, may be added before they are squared.

The variance. Let M = dW dW^T, with trace ||dW||^2, and r = (tr M)^2 / ||M||^2 its effective rank, from 1 to min(p, d).
For Gaussian entries, the rows u of P and v of Q having E (v^T A v)^2 = (tr A)^2 + 2 ||A||^2 for symmetric A,

    Var ||S||^2 = (2/m) E ||dW Q^T Q dW^T||^2 + Var ||dW Q^T||^2
                = (2/m) ((tr M)^2 + (m + 1) ||M||^2) / m + (2/m) ||M||^2
    Var ||S||^2 / ||dW||^4 = 2/m^2 + (4/m + 2/m^2) / r           from 2/m^2, all directions alike, to 4/m + 4/m^2, one

Signs have E (v^T A v)^2 = (tr A)^2 + 2 ||A||^2 - 2 sum_j A_jj^2: never more than that, and they are exact in any dtype.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from oblr_megatron.gradnorm.products import multiply, product, sum_dtype, widen

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.gradnorm.segments import Segments


class Sketch:
    """The projections of one weight, or of one shard of it.

    They depend on the size, the shape, the seed and the name alone: ranks that add up their projections give the same
    name; shards, squared each for itself, had better not, lest their errors agree.

    Args:
        shape: (p, d), that of the weight.
        size: m.
        seed: of the run.
        name: what distinguishes this weight from the others.
        dtype: the signs are kept in.
        device: of the factors.
    """

    def __init__(
        self, shape: tuple[int, int], size: int, seed: int, name: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        self.size = size
        self._outputs, self._inputs = (_signs(size, width, generator).to(device, dtype) for width in shape)

    def project(self, x: Tensor, dy: Tensor, segments: Segments) -> Tensor:
        """S_i of each sample: x [t, b, d] and dy [t, b, p], packed also [tokens, d] and [tokens, p] -> [n, m, m].

        In fp32, of fp64 factors in fp64. The norm of a sample whose factors are not finite is not finite.
        """
        small_x, small_dy = _projected(x, self._inputs), _projected(dy, self._outputs)
        out = small_x.new_empty(segments.num_samples, self.size, self.size)
        for out_i, x_i, dy_i in zip(out, segments.split(small_x), segments.split(small_dy), strict=True):
            product(x_i, dy_i, out_i)
        return out.div_(self.size)


def _signs(size: int, width: int, generator: torch.Generator) -> Tensor:
    """+1 or -1 at random: [size, width]."""
    return 1 - 2 * torch.randint(0, 2, (size, width), generator=generator, dtype=torch.int8)


def _projected(factor: Tensor, signs: Tensor) -> Tensor:
    """[..., h] times signs^T [h, m] -> [..., m]."""
    flat = widen(factor).flatten(0, -2)
    out = torch.empty(len(flat), len(signs), dtype=sum_dtype(factor), device=factor.device)
    multiply(flat[None], signs.to(flat.dtype).t()[None], out[None])
    return out.unflatten(0, factor.shape[:-1])
