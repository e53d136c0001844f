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
from oblr_megatron.gradnorm.rules import Kind, Rule, classify

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.gradnorm.reduce import Reducer
    from oblr_megatron.gradnorm.segments import Segments
    from oblr_megatron.model.qwen3 import Policy


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


class Sketches:
    """A projection for every linear layer that is large enough for it to pay.

    Shards of one weight have projections of their own; the ranks that share sequences have the same.
    """

    def __init__(self, policy: Policy, size: int, seed: int) -> None:
        parallel = policy.parallel
        where = f"{parallel.pp_rank}/{parallel.tp_rank}"
        self._sketches = {
            id(rule.param): Sketch(
                (rule.param.shape[0], rule.param.shape[1]),
                size,
                seed,
                f"{where}/{rule.chunk}/{rule.name}",
                rule.param.dtype if rule.param.dtype == torch.float64 else torch.float32,
                parallel.device,
            )
            for rule in classify(policy)
            if _sketched(rule, size)
        }

    def covers(self, rule: Rule) -> bool:
        """Whether this parameter's norms are estimated."""
        return id(rule.param) in self._sketches

    def sq_norms(self, rule: Rule, x: Tensor, dy: Tensor, segments: Segments, reducer: Reducer) -> Tensor:
        """[n] fp64 estimates of a linear layer's squared norms, as far as this rank counts them."""
        small = self._sketches[id(rule.param)].project(x, dy, segments)  # [n, m, m]
        reducer.over_context(small)
        norms = small.to(torch.float64).square().sum(dim=(1, 2))
        return norms if reducer.parallel.cp_rank == 0 else torch.zeros_like(norms)


def _sketched(rule: Rule, size: int) -> bool:
    matrix = rule.tapped and rule.kind is Kind.SHARD and not rule.expert and rule.param.dim() == 2
    return matrix and not rule.name.startswith("embedding") and min(rule.param.shape) > 2 * size
