"""Mode `bookkeep`: one pass that keeps the factors of every weight gradient and multiplies them once A is known.

Forward and input gradients run once. Each linear layer's x and dy are kept; the output layer makes its dy again. They
give the norms, the norms give the advantages, and sum_i c_i dy_i^T x_i is one product over the tokens of a microbatch.
The cost is the arithmetic of the norms (the Gram form for short responses) and the memory of all factors of a window of
prompts.

With activation recomputation the kept factors are those of the second forward, so that recomputation saves less memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oblr_megatron.model.step import run_schedule
from oblr_megatron.model.taps import add_product, add_rows, main_grad
from oblr_megatron.norms.accumulate import NormAccumulator
from oblr_megatron.norms.norm_sink import NormSink, segments_of
from oblr_megatron.norms.rules import Rule, untapped_aside
from oblr_megatron.runtime.device_copy import to_device

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from oblr_megatron.model.lm_head import HeadFactors
    from oblr_megatron.model.step import LossFn
    from oblr_megatron.model.tapped import TappedModel
    from oblr_megatron.model.taps import Splits
    from oblr_megatron.norms.reduce import Reducer
    from oblr_megatron.norms.segments import Segments
    from oblr_megatron.types import TokenRows


def keep_factors(
    model: TappedModel,
    batches: Sequence[TokenRows],
    loss_of: LossFn,
    rules: Sequence[Rule],
    reducer: Reducer,
) -> tuple[Tensor, list[dict[str, Tensor]], BookkeepSink]:
    """Squared norms [n] fp64, the loss's records, and the sink with the factors of all gradients.

    `main_grad` is unchanged until `BookkeepSink.add_gradient`. Arguments as in `sq_grad_norms`.
    """
    sink = BookkeepSink(rules, NormAccumulator(rules, batches, reducer))
    with untapped_aside(rules):
        records = run_schedule(model, batches, loss_of, sink=sink)
        return reducer.finish(sink.accumulator), records, sink


@dataclass(slots=True)
class _Product:
    """A linear layer's factors in one microbatch: x [t, b, d] or [t, d], dy [t, b, p] or [t, p]."""

    weight: Parameter
    slot: int
    segments: Segments
    x: Tensor
    dy: Tensor


@dataclass(slots=True)
class _Rows:
    """The embedding's factors: rows [b, t], dy [b, t, h]."""

    weight: Parameter
    slot: int
    segments: Segments
    rows: Tensor
    dy: Tensor


@dataclass(slots=True)
class _KeptVectors:
    """A small parameter's gradients [n, ...], one for each sample."""

    weight: Parameter
    slot: int
    grads: Tensor


@dataclass(slots=True)
class _Head:
    """The output layer's factors, which make dy again."""

    slot: int
    factors: HeadFactors


class BookkeepSink(NormSink):
    """Measures the norms and keeps the factors of the gradient."""

    def __init__(self, rules: Sequence[Rule], accumulator: NormAccumulator) -> None:
        super().__init__(rules, accumulator)
        self._kept: list[_Product | _Head | _Rows | _KeptVectors] = []

    def linear(self, weight: Parameter, x: Tensor, dy: Tensor, splits: Splits | None = None) -> None:
        """Keep x and dy without copying."""
        super().linear(weight, x, dy, splits)
        self._kept.append(_Product(weight, self.slot, self.local_segments(len(x)), x, dy))

    def head(self, factors: HeadFactors, rows: slice, dy: Tensor) -> None:
        """Keep what makes dy again."""
        super().head(factors, rows, dy)
        if rows.start == 0:
            self._kept.append(_Head(self.slot, factors))

    def embedding(self, weight: Parameter, rows: Tensor, dy: Tensor) -> None:
        """Keep dy."""
        super().embedding(weight, rows, dy)
        self._kept.append(_Rows(weight, self.slot, self.segments, rows, dy))

    def vector(self, rule: Rule, grads: Tensor) -> None:
        """Keep each sample's small gradient."""
        super().vector(rule, grads)
        self._kept.append(_KeptVectors(rule.param, self.slot, grads))

    def end(self, position: int, chunk: int) -> None:
        """Keep a copy of the untapped gradients."""
        for rule in self.untapped:
            if rule.chunk == chunk:
                self._kept.append(_KeptVectors(rule.param, self.slot, rule.grad.clone()[None]))
        super().end(position, chunk)

    @torch.no_grad()
    def add_gradient(self, coefficients: Tensor) -> None:
        """main_grad += sum_i c_i grad_i, then free the factors: c [n] fp64, 0 leaves a sample out.

        The coefficients stay on the host: to look at one on a GPU would wait for the GPU, at every layer and sample.
        """
        coefficients = coefficients.cpu()
        while self._kept:  # pop, to free each factor as soon as it is used
            kept = self._kept.pop()
            if isinstance(kept, _KeptVectors):
                add_sample_vectors(kept.weight, kept.grads, coefficients[kept.slot : kept.slot + len(kept.grads)])
                continue
            segments = segments_of(kept.factors) if isinstance(kept, _Head) else kept.segments
            own = coefficients[kept.slot : kept.slot + segments.num_samples]
            if isinstance(kept, _Head):
                for rows, dy in kept.factors.blocks():
                    add_sample_products(main_grad(kept.factors.weight)[rows], kept.factors.x, dy, segments, own)
            elif isinstance(kept, _Product):
                add_sample_products(main_grad(kept.weight), kept.x, kept.dy, segments, own)
            else:
                add_sample_rows(kept.weight, kept.rows, kept.dy, segments, own)


def add_sample_vectors(weight: Parameter, grads: Tensor, own: Tensor) -> None:
    """main_grad += sum_i c_i grads_i: grads [n, ...], c [n]."""
    used, target = own.nonzero().flatten(), main_grad(weight)
    if len(own) == 1:
        if len(used):
            target.add_(grads[0].view(target.shape), alpha=float(own[0]))
        return
    if len(used) < len(own):  # select instead of multiplying: 0 * NaN is NaN
        own, grads = own[used], grads.index_select(0, to_device(used, grads.device))
    target.add_((to_device(own, grads.device, grads.dtype) @ grads.flatten(1)).view(target.shape))


def add_sample_rows(weight: Parameter, rows: Tensor, dy: Tensor, segments: Segments, own: Tensor) -> None:
    """main_grad[rows] += c dy: rows [b, t], dy [b, t, h], c [n]."""
    scaled = _scaled(dy, own[:, None] if segments.cu_seqlens is None else _per_token(segments, own))
    add_rows(main_grad(weight), rows, scaled)


def add_sample_products(target: Tensor, x: Tensor, dy: Tensor, segments: Segments, own: Tensor) -> None:
    """target += sum_i c_i dy_i^T x_i: leave out the samples with c = 0, scale the narrower factor, and multiply."""
    if len(own) == 1:
        if own[0] != 0:
            add_product(target, x, dy, float(own[0]))
        return
    if segments.cu_seqlens is None:
        values = own  # [b]
    else:
        values = _per_token(segments, own)[0][:, None] if x.dim() > 2 else _per_token(segments, own)[0]
    if x.shape[-1] < dy.shape[-1]:
        add_product(target, _scaled(x, values), _without(dy, values))
    else:
        add_product(target, _without(x, values), _scaled(dy, values))


def _per_token(segments: Segments, own: Tensor) -> Tensor:
    """[1, t]: the coefficient of each token of a packed row."""
    assert segments.cu_seqlens is not None, "a packed row has the bounds of its samples"
    return own.repeat_interleave(torch.tensor(segments.cu_seqlens).diff())[None]


def _scaled(factor: Tensor, values: Tensor) -> Tensor:
    """factor [.., .., h] times values [.., ..] on the host; 0 where a value is 0, even if the factor is not finite."""
    scaled, left_out = factor * to_device(values[..., None], factor.device, factor.dtype), values == 0
    if bool(left_out.any()):  # on the host: filling takes several times as long as the product
        scaled.masked_fill_(to_device(left_out[..., None], factor.device), 0.0)
    return scaled


def _without(factor: Tensor, values: Tensor) -> Tensor:
    """The factor with 0 for values of 0, because it may not be finite there; the factor itself if there are none."""
    left_out = values == 0
    return factor.masked_fill(to_device(left_out[..., None], factor.device), 0.0) if bool(left_out.any()) else factor
