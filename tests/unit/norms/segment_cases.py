"""Random microbatches (rows or packed), and the gradient of each sample from autograd."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from oblr_megatron.norms import products, segments
from oblr_megatron.norms.products import Tiles
from oblr_megatron.norms.segments import Segments


@dataclass(frozen=True)
class Case:
    """n samples of these lengths, as rows or packed."""

    lengths: tuple[int, ...]
    packed: bool
    flat: bool  # packed factors without the dimension b = 1
    seed: int

    @property
    def segments(self) -> Segments:
        if not self.packed:
            return Segments(len(self.lengths), None)
        return Segments(len(self.lengths), tuple(sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)))

    def factor(self, width: int | tuple[int, ...], *, salt: int, zero_padding: bool) -> Tensor:
        """[t, b, width...] in fp64; padding is noise, or zero as in a backward."""
        sizes = (width,) if isinstance(width, int) else width
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        if self.packed:
            return torch.randn(sum(self.lengths), 1, *sizes, generator=generator, dtype=torch.float64)
        longest = max(self.lengths, default=3) + 1
        values = torch.randn(longest, len(self.lengths), *sizes, generator=generator, dtype=torch.float64)
        if zero_padding:
            for column, length in enumerate(self.lengths):
                values[length:, column] = 0.0
        return values

    def laid_out(self, factor: Tensor) -> Tensor:
        """The factor in the layout for the function under test."""
        return factor[:, 0] if self.packed and self.flat else factor

    def sample(self, factor: Tensor, index: int) -> Tensor:
        """The tokens of one sample, without padding."""
        if not self.packed:
            return factor[: self.lengths[index], index]
        start = sum(self.lengths[:index])
        return factor[start : start + self.lengths[index], 0]


def cases() -> st.SearchStrategy[Case]:
    """Cases with no sample, and with samples of no token, one token or several."""
    lengths = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 13)), max_size=5).map(tuple)
    return st.builds(Case, lengths=lengths, packed=st.booleans(), flat=st.booleans(), seed=st.integers(0, 1000))


@contextmanager
def tiles(side: int, strip: int, call_flops: int, viewed: int = segments.VIEWED) -> Iterator[None]:
    """Tiles so small that a few tokens need several; runs of `viewed` samples have a call of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "CPU_TILES", Tiles(side=side, strip=strip, element_flops=4, call_flops=call_flops))
        patch.setattr(segments, "VIEWED", viewed)
        yield


def weight_grad(shape: tuple[int, ...], objective: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of a scalar with respect to a weight of this shape."""
    weight = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(objective(weight), weight)
    return grad


def linear_grads(case: Case, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Each sample's gradient [p, d] of a linear layer, from autograd."""
    grads = []
    for index in range(len(case.lengths)):
        x_i, dy_i = case.sample(x, index), case.sample(dy, index)
        shape = (dy.shape[-1], x.shape[-1])
        grads.append(
            weight_grad(shape, lambda w, x_i=x_i, dy_i=dy_i: (torch.nn.functional.linear(x_i, w) * dy_i).sum())
        )
    return grads


def stacked(grads: list[Tensor], *shape: int) -> Tensor:
    """[n, ...], also for n = 0."""
    return torch.stack(grads) if grads else torch.zeros(0, *shape, dtype=torch.float64)
