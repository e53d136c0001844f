"""Unbiased estimates of squared weight-gradient norms from small random projections.

    S_i = P dW_i Q^T = sum_t (P dy_t)(Q x_t)^T          P [m, p], Q [m, d], entries +-1 / sqrt(m), E P^T P = E Q^T Q = 1
    E ||S_i||^2 = ||dW_i||^2

The cost is 2 t m (p + d) FLOPs instead of 2 t p d. S_i is linear in dW_i, so ranks with the same P and Q may add their
partial S_i before squaring.

Variance: let M = dW dW^T, with trace ||dW||^2, and r = (tr M)^2 / ||M||^2 its effective rank, from 1 to min(p, d).
For Gaussian entries, a row v of P or Q has E (v^T A v)^2 = (tr A)^2 + 2 ||A||^2 for symmetric A, and

    Var ||S||^2 = (2/m) E ||dW Q^T Q dW^T||^2 + Var ||dW Q^T||^2
                = (2/m) ((tr M)^2 + (m + 1) ||M||^2) / m + (2/m) ||M||^2
    Var ||S||^2 / ||dW||^4 = 2/m^2 + (4/m + 2/m^2) / r           2/m^2 for large r; 4/m + 4/m^2 for r = 1

Signs have E (v^T A v)^2 = (tr A)^2 + 2 ||A||^2 - 2 sum_j A_jj^2, which is never larger, and are exact in any dtype.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from oblr_megatron.norms.products import multiply, product, sum_dtype, widen
from oblr_megatron.norms.rules import Kind, Rule, classify

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.model.tapped import TappedModel
    from oblr_megatron.norms.reduce import Reducer
    from oblr_megatron.norms.segments import Segments


class Sketch:
    """The random projections P and Q of one weight, or of one shard of it.

    They depend only on size, shape, seed and name. Ranks that sum their projections must use the same name. Shards that
    are squared separately should use different names, so that their errors are independent.

    Args:
        shape: (p, d) of the weight.
        size: m.
        seed: the run's seed.
        name: identifies the weight or shard.
        dtype: stores the signs.
        device: where the factors are.
    """

    def __init__(
        self, shape: tuple[int, int], size: int, seed: int, name: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        self.size = size
        self._outputs, self._inputs = (_signs(size, width, generator).to(device, dtype) for width in shape)

    def project(self, x: Tensor, dy: Tensor, segments: Segments) -> Tensor:
        """S_i of each sample: x [t, b, d] and dy [t, b, p], or packed [tokens, d] and [tokens, p] -> [n, m, m].

        The result is fp64 for fp64 factors, else fp32. A sample with non-finite factors has a non-finite S_i.
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
    """A projection for every linear layer that is large enough to gain from it.

    Each shard of a weight has its own projection. Context-parallel ranks use the same one.
    """

    def __init__(self, policy: TappedModel, size: int, seed: int) -> None:
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
        """[n] fp64 estimates of a linear layer's squared norms; zeros except on context-parallel rank 0."""
        small = self._sketches[id(rule.param)].project(x, dy, segments)  # [n, m, m]
        reducer.over_context(small)
        norms = small.to(torch.float64).square().sum(dim=(1, 2))
        return norms if reducer.parallel.cp_rank == 0 else torch.zeros_like(norms)


def _sketched(rule: Rule, size: int) -> bool:
    matrix = rule.tapped and rule.kind is Kind.SHARD and not rule.expert and rule.param.dim() == 2
    return matrix and not rule.name.startswith("embedding") and min(rule.param.shape) > 2 * size
