"""One rank's share of each sample's squared norm, summed until `reduce` combines the ranks.

A whole gradient is squared at once. A small partial gradient is buffered and summed over ranks later (`vectors`,
`rows`). A large partial gradient is completed by the reducer immediately.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from oblr_megatron.families import EMBEDDING
from oblr_megatron.model.sq_norms import sq_norm
from oblr_megatron.norms.embedding_rows import EmbeddingRows, wide_bytes
from oblr_megatron.norms.rules import Kind, Rule

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.norms.reduce import Reducer
    from oblr_megatron.types import TokenRows


class NormAccumulator:
    """Squared norms and buffered partial gradients of n samples, one slot a sample, in microbatch order.

    Args:
        rules: one for every parameter of this rank.
        batches: the microbatches of one pipeline run, before sequences are cut over ranks.
        reducer: completes large partial gradients.
        squares_rows: whether ||E||^2 is taken from the buffered embedding rows. False if the embedding's whole
            gradient is passed to `matrix`.
    """

    def __init__(
        self, rules: Sequence[Rule], batches: Sequence[TokenRows], reducer: Reducer, *, squares_rows: bool = True
    ) -> None:
        self.reducer, self.parallel = reducer, reducer.parallel
        self.first = _offsets(batch.num_samples for batch in batches)  # slot of each microbatch's first sample
        slots, device = self.first[-1], self.parallel.device
        # One column for each replica of the block, because an expert's gradient mixes their samples.
        self.sq_norms = torch.zeros(slots, self.parallel.block_size, dtype=torch.float64, device=device)
        self.vectors = {kind: _Vectors(kind_rules, slots) for kind, kind_rules in _buffered(rules, self.parallel)}
        self.rows = EmbeddingRows.of(rules, batches, self.parallel, squares=squares_rows)

    @property
    def own(self) -> Tensor:
        """[n] squared norms of this replica's samples: a view of its column."""
        return self.sq_norms[:, self.parallel.block_rank]

    def vector(self, rule: Rule, slot: int, grads: Tensor) -> None:
        """Add gradients [k, ...] of a small parameter, for the k samples from `slot` on."""
        if not self._buffer(rule, slot, grads) and self.counts(rule):
            self.own[slot : slot + len(grads)] += grads.flatten(1).to(torch.float64).square().sum(dim=1)

    def matrix(self, rule: Rule, slot: int, grad: Tensor, source: int | None = None) -> None:
        """Add this rank's gradient of one sample for one parameter. The caller may overwrite it afterwards.

        Args:
            rule: the parameter's rule.
            slot: the sample's slot.
            grad: has the parameter's shape.
            source: the sample's replica within the block; this rank's own by default.
        """
        if not self._buffer(rule, slot, grad[None]) and self.counts(rule):
            column = self.parallel.block_rank if source is None else source
            self.sq_norms[slot, column] += sq_norm(self.reducer.complete(rule, grad))

    def counts(self, rule: Rule) -> bool:
        """Whether the norm includes the squares of this rank's gradient."""
        return rule.kind is Kind.SHARD or (rule.kind is not Kind.FROZEN and self.parallel.tp_rank == 0)

    def _buffer(self, rule: Rule, slot: int, grads: Tensor) -> bool:
        """Buffer gradients [k, ...] if ranks must sum them first; returns whether it did."""
        buffer = self.vectors.get(rule.kind)
        if buffer is None or id(rule.param) not in buffer.spans:
            return False
        start, end = buffer.spans[id(rule.param)]
        buffer.values[slot : slot + len(grads), start:end] += grads.flatten(1)
        return True


class _Vectors:
    """Buffered gradients [n, P] of the small parameters of one kind."""

    def __init__(self, rules: Sequence[Rule], slots: int) -> None:
        ends = _offsets(rule.param.numel() for rule in rules)
        self.spans = {id(rule.param): span for rule, *span in zip(rules, ends[:-1], ends[1:], strict=True)}
        grad = rules[0].grad
        self.values = grad.new_zeros(slots, ends[-1], dtype=torch.promote_types(grad.dtype, torch.float32))


def buffered_bytes(rules: Sequence[Rule], batch: TokenRows, parallel: Parallel) -> int:
    """Bytes that this rank buffers for one microbatch until `Reducer.finish`."""
    vectors = sum(
        rule.grad.numel() * wide_bytes(rule.grad) for _, kind_rules in _buffered(rules, parallel) for rule in kind_rules
    )
    return vectors * batch.num_samples + EmbeddingRows.bytes_of(rules, batch, parallel)


def _buffered(rules: Sequence[Rule], parallel: Parallel) -> list[tuple[Kind, list[Rule]]]:
    """The small parameters to sum over ranks: partials; with context parallelism also copies and column biases."""
    small = [rule for rule in rules if rule.name != EMBEDDING and not (rule.kind is Kind.SHARD and _large(rule))]
    kinds = (Kind.PARTIAL, Kind.COPY, Kind.SHARD) if parallel.cp_size > 1 else (Kind.PARTIAL,)
    by_kind = [(kind, [rule for rule in small if rule.kind is kind]) for kind in kinds]
    return [(kind, kind_rules) for kind, kind_rules in by_kind if kind_rules]


def _large(rule: Rule) -> bool:
    return rule.expert or rule.param.dim() > 1


def _offsets(counts: Iterable[int]) -> list[int]:
    """Running sums from 0 to the total."""
    return list(accumulate(counts, initial=0))
