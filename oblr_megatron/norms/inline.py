"""Mode `inline`: norms inside the one gradient pass, for coefficients that are known before it.

Backward runs with c = 1, so that its factors are those of the score. The sink squares each sample's weight gradient
and adds c times it to `main_grad` at once: nothing is kept. Long samples form each weight gradient once, in tiles, for
both. Otherwise the norm takes its own arithmetic, which is small for short samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from oblr_megatron.model.sq_norms import sq_norm
from oblr_megatron.model.step import run_schedule
from oblr_megatron.model.taps import main_grad
from oblr_megatron.norms.accumulate import NormAccumulator
from oblr_megatron.norms.bookkeep import add_sample_products, add_sample_rows, add_sample_vectors
from oblr_megatron.norms.norm_sink import NormSink, segments_of
from oblr_megatron.norms.products import product_of_gradient, sum_dtype, tile_rows, wants_product
from oblr_megatron.norms.rules import Kind, Rule, untapped_aside

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


class InlineSink(NormSink):
    """Measures the norms and adds every sample's gradient, times its coefficient, to `main_grad`.

    Args:
        rules: one for every parameter of this rank.
        accumulator: has a slot for each sample of this pipeline run.
        coefficients: c [n] fp64 on the CPU, one a slot; a sample with c = 0 is measured only.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        accumulator: NormAccumulator,
        coefficients: Tensor,
    ) -> None:
        super().__init__(rules, accumulator)
        self._coefficients = coefficients
        self._sums = [torch.zeros_like(rule.grad) for rule in self.untapped]

    def linear(self, weight: Parameter, x: Tensor, dy: Tensor, splits: Splits | None = None) -> None:
        """Measure and add a linear layer's gradient; form it once a sample where that is faster."""
        rule = self.rules[id(weight)]
        if not self._forms_product(rule, x, dy):
            super().linear(weight, x, dy, splits)
            add_sample_products(main_grad(weight), x, dy, self.local_segments(len(x)), self._own)
            return
        self._add_products(rule, main_grad(weight), x, dy, self.segments)
        if rule.tied:
            self._head_rows(x, dy, self.segments)

    def head(self, factors: HeadFactors, rows: slice, dy: Tensor) -> None:
        """Measure and add a block of the output layer's gradient."""
        rule, x, segments = self.rules[id(factors.weight)], factors.x, segments_of(factors)
        target = main_grad(factors.weight)[rows]
        if not self._forms_product(rule, x, dy):
            super().head(factors, rows, dy)
            add_sample_products(target, x, dy, segments, self._own)
            return
        self._add_products(rule, target, x, dy, segments)
        if rule.tied:
            self._head_rows(x, dy, segments, rows.start)

    def _add_products(self, rule: Rule, target: Tensor, x: Tensor, dy: Tensor, segments: Segments) -> None:
        """Form each sample's product in tiles, for its norm and for its part of `target`."""
        height = tile_rows(x)
        tile = torch.empty(min(height, len(target)), x.shape[-1], dtype=sum_dtype(x), device=x.device)
        parts = list(zip(segments.split(x), segments.split(dy), self._own.tolist(), strict=True))
        for start in range(0, len(target), height):
            rows = target[start : start + height]
            for sample, (x_i, dy_i, factor) in enumerate(parts):
                grad = tile[: len(rows)]
                product_of_gradient(x_i, dy_i[:, start : start + height], grad)
                if factor:
                    rows.add_(grad, alpha=factor)
                if self.accumulator.counts(rule):
                    complete = self.accumulator.reducer.complete(rule, grad)
                    self.accumulator.own[self.slot + sample] += sq_norm(complete)

    def embedding(self, weight: Parameter, rows: Tensor, dy: Tensor) -> None:
        """Measure the embedding's rows and add them."""
        super().embedding(weight, rows, dy)
        add_sample_rows(weight, rows, dy, self.segments, self._own)

    def vector(self, rule: Rule, grads: Tensor) -> None:
        """Measure a norm's weight and add its gradient."""
        super().vector(rule, grads)
        add_sample_vectors(rule.param, grads, self._own)

    def end(self, position: int, chunk: int) -> None:
        """Measure the untapped parameters, and keep their weighted sum aside."""
        factor = float(self._own[0])
        for rule, total in zip(self.untapped, self._sums, strict=True):
            if rule.chunk == chunk and factor:
                total.add_(rule.grad, alpha=factor)
        super().end(position, chunk)

    def add_untapped(self) -> None:
        """Add the weighted gradients of the untapped parameters to `main_grad`."""
        for rule, total in zip(self.untapped, self._sums, strict=True):
            rule.grad.add_(total)

    @property
    def _own(self) -> Tensor:
        """Coefficients of the microbatch's samples."""
        return self._coefficients[self.slot : self.slot + self.segments.num_samples]

    def _forms_product(self, rule: Rule, x: Tensor, dy: Tensor) -> bool:
        """Whether one product a sample serves the norm and the gradient: the microbatch's samples are long enough."""
        if rule.expert or rule.kind is Kind.PARTIAL:
            return False
        samples = self.segments.num_samples
        if self.accumulator.reducer.sum_group(rule) is not None:  # the norm then needs the product itself
            return samples == 1
        return wants_product(x[..., 0].numel() // max(1, samples), x.shape[-1], dy.shape[-1], x)


def add_inline(
    model: TappedModel,
    batches: Sequence[TokenRows],
    loss_of: LossFn,
    coefficients: Tensor,
    rules: Sequence[Rule],
    reducer: Reducer,
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """main_grad += sum_i c_i grad_i; returns squared norms [n] fp64 and the loss's records.

    `coefficients` c [n] fp64 on the CPU are in the order of the samples. Other arguments as in `sq_grad_norms`.
    """
    accumulator = NormAccumulator(rules, batches, reducer)
    sink = InlineSink(rules, accumulator, coefficients)
    with untapped_aside(rules):
        records = run_schedule(model, batches, loss_of, sink=sink)
    sink.add_untapped()
    return reducer.finish(accumulator), records
