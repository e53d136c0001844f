"""The sink that turns a backward pass into squared norms; it keeps no sample's gradient.

A linear layer's ||dy_i^T x_i||^2 comes from `segments.product_sq_norms`. If the gradient is a partial sum over ranks
(context parallelism), the ranks sum it, and each squares its share of the sum. Several samples may share a microbatch
if every parameter is tapped. Untapped gradients are read from `main_grad`, which holds the sum over a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from oblr_megatron.families import OUTPUT
from oblr_megatron.model.sq_norms import row_dots
from oblr_megatron.norms.embedding_rows import needs_rows
from oblr_megatron.norms.products import product, sum_dtype
from oblr_megatron.norms.rules import Kind, Rule
from oblr_megatron.norms.segments import (
    Segments,
    product_rows,
    product_sq_norms,
    row_grads,
    sample_products,
    scale_grads,
)
from oblr_megatron.runtime.device_copy import to_device

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from oblr_megatron.model.lm_head import HeadFactors
    from oblr_megatron.model.taps import Splits
    from oblr_megatron.norms.accumulate import NormAccumulator
    from oblr_megatron.types import TokenRows


class NormSink:
    """Adds the squared norms of each microbatch's samples to the accumulator (a `model.taps.Sink`).

    Args:
        rules: one for every parameter of this rank.
        accumulator: has a slot for each sample of this pipeline run.
    """

    def __init__(self, rules: Sequence[Rule], accumulator: NormAccumulator) -> None:
        self.rules = {id(rule.param): rule for rule in rules}
        self.untapped = [rule for rule in rules if not rule.tapped and rule.kind is not Kind.FROZEN]
        self.accumulator = accumulator
        self.slot = 0  # the microbatch's first sample
        self.tokens = 0  # t
        self.segments = Segments(0, None)

    def begin(self, position: int, chunk: int, batch: TokenRows) -> None:
        """Set the samples that the following factors belong to."""
        self.slot, self.tokens = self.accumulator.first[position], batch.input_ids.shape[1]
        offsets = None if batch.cu_seqlens is None else tuple(batch.cu_seqlens.tolist())
        self.segments = Segments(batch.num_samples, offsets)

    def linear(self, weight: Parameter, x: Tensor, dy: Tensor, splits: Splits | None = None) -> None:
        """Measure a linear layer: x [t, b, d], dy [t, b, p]; for an expert [tokens, d] and [tokens, p]."""
        rule = self.rules[id(weight)]
        if rule.expert:
            self._expert(rule, x, dy, splits or [(self.accumulator.parallel.block_rank, len(x))])
            return
        self._products(rule, x, dy, self.local_segments(len(x)))
        if rule.tied:
            self._head_rows(x, dy, self.segments)

    def head(self, factors: HeadFactors, rows: slice, dy: Tensor) -> None:
        """Measure a block of the output layer's gradient: its squares add to those of the other blocks."""
        rule, segments = self.rules[id(factors.weight)], segments_of(factors)
        self._products(rule, factors.x, dy, segments)
        if rule.tied:
            self._head_rows(factors.x, dy, segments, rows.start)

    def embedding(self, weight: Parameter, rows: Tensor, dy: Tensor) -> None:
        """Measure the embedding: rows [b, t], dy [b, t, h]."""
        rule = self.rules[id(weight)]
        sample, row, grads = row_grads(rows, dy, self.segments)
        if needs_rows(rule, self.accumulator.parallel):
            assert self.accumulator.rows is not None, f"the rows of {rule.name} are not buffered"
            self.accumulator.rows.add_embedding(sample + self.slot, row, grads)
        elif self.accumulator.counts(rule):
            self.accumulator.own.index_add_(0, sample + self.slot, row_dots(grads, grads))

    def scale(self, weight: Parameter, terms: Tensor) -> None:
        """Measure a norm's weight or a bias: terms [t, b, ..., h]."""
        self.vector(self.rules[id(weight)], scale_grads(terms, self.local_segments(len(terms))))

    def vector(self, rule: Rule, grads: Tensor) -> None:
        """Add gradients [n, h] of a norm's weight, one for each sample of the microbatch."""
        self.accumulator.vector(rule, self.slot, grads)

    def end(self, position: int, chunk: int) -> None:
        """Measure the untapped parameters: their gradients are in `main_grad`."""
        for rule in self.untapped:
            if rule.chunk == chunk:
                assert self.segments.num_samples == 1, f"{rule.name} is untapped and needs one sample a microbatch"
                self.accumulator.matrix(rule, self.slot, rule.grad)
                rule.grad.zero_()

    def local_segments(self, length: int) -> Segments:
        """The segments of this rank's `length` tokens, if sequence parallelism has cut the sequence."""
        offsets = self.segments.cu_seqlens
        if offsets is None or length == self.tokens:
            return self.segments
        start = self.accumulator.parallel.tp_rank * length
        return Segments(self.segments.num_samples, tuple(min(max(end - start, 0), length) for end in offsets))

    def _products(self, rule: Rule, x: Tensor, dy: Tensor, segments: Segments) -> None:
        """Add the squares of dy_i^T x_i of each sample i; ranks that share the sequence first sum it."""
        partial = rule.kind is Kind.PARTIAL
        if not (partial or self.accumulator.counts(rule)):
            return
        if not partial and self.accumulator.reducer.sum_group(rule) is None:
            own = self.accumulator.own[self.slot : self.slot + segments.num_samples]
            own += product_sq_norms(x, dy, segments)
            return
        for sample, grad in sample_products(x, dy, segments):
            self.accumulator.matrix(rule, self.slot + sample, grad)

    def _head_rows(self, x: Tensor, dy: Tensor, segments: Segments, start: int = 0) -> None:
        """Buffer a tied output layer's gradient rows at the tokens of each sample; dy has the rows from `start` on."""
        rows = self.accumulator.rows
        assert rows is not None and rows.head is not None, f"{OUTPUT} is tied and its rows are not buffered"
        span = rows.span(self.slot, self.slot + segments.num_samples)
        row = rows.row[span] - start
        held = ((row >= 0) & (row < dy.shape[-1])).nonzero().flatten()
        sample = rows.sample[span][held] - self.slot
        places = to_device(held + span.start, rows.head.device)
        rows.head.index_copy_(0, places, product_rows(x, dy, segments, sample, row[held]))

    def _expert(self, rule: Rule, x: Tensor, dy: Tensor, splits: Splits) -> None:
        """Measure an expert, which has seen the tokens of one sample of each replica in the block."""
        starts = list(accumulate((count for _, count in splits), initial=0))
        for source in dict.fromkeys(source for source, _ in splits):
            parts = [slice(*starts[k : k + 2]) for k, split in enumerate(splits) if split[0] == source]
            own_x, own_dy = (torch.cat([factor[part] for part in parts]) for factor in (x, dy))
            if self.accumulator.reducer.sum_group(rule) is None:
                segments = Segments(1, (0, len(own_x)))
                self.accumulator.sq_norms[self.slot, source] += product_sq_norms(own_x, own_dy, segments)[0]
            else:  # even without a token: the other ranks wait in the reduce-scatter
                grad = torch.empty(rule.param.shape, dtype=sum_dtype(own_x), device=own_x.device)
                product(own_x, own_dy, grad)
                self.accumulator.matrix(rule, self.slot, grad, source)


def segments_of(factors: HeadFactors) -> Segments:
    """The samples of the output layer's factors, which are packed and have only the tokens that count."""
    return Segments(len(factors.bounds) - 1, factors.bounds)
