"""Combine per-rank partial gradients into norms: sum partials, square, count each shard once, sum over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from oblr_megatron.model.sq_norms import row_dots, row_sq_norms
from oblr_megatron.norms.rules import Kind, Rule
from oblr_megatron.runtime.collectives import all_reduce
from oblr_megatron.runtime.device_copy import to_device

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.norms.accumulate import NormAccumulator
    from oblr_megatron.norms.embedding_rows import EmbeddingRows


class Reducer:
    """The sums over ranks that make the norms exact, one method each.

    Every rank of a replica calls `finish` after each pipeline run, with the same samples in the same order. If replicas
    share experts, every rank of the block calls it, with the same number of samples.
    """

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel

    def finish(self, accumulator: NormAccumulator) -> Tensor:
        """[n] fp64 squared norms of this replica's samples, the same on all its ranks."""
        norms = accumulator.sq_norms.clone()
        own = norms[:, self.parallel.block_rank]
        for kind, buffer in accumulator.vectors.items():
            own += self.vectors(kind, buffer.values)
        if accumulator.rows is not None:
            own += self.rows(accumulator.rows, len(norms))
        return self.total(norms)[:, self.parallel.block_rank]

    def sum_group(self, rule: Rule) -> ProcessGroup | None:
        """The ranks over which this shard's gradient must be summed; None if it is whole."""
        if rule.expert:
            return self.parallel.expert_sum_group
        return self.parallel.cp_group if self.parallel.cp_size > 1 else None

    def complete(self, rule: Rule, grad: Tensor) -> Tensor:
        """The elements of one sample's gradient that this rank squares: all, or its share of the sum over ranks.

        The shares are padded with zeros to equal length. `grad` stays as it is.
        """
        group = self.sum_group(rule)
        if group is None:
            return grad.flatten()
        share = grad.new_empty(-(-grad.numel() // group.size()))
        padding = len(share) * group.size() - grad.numel()
        flat = grad.flatten()
        dist.reduce_scatter_tensor(share, torch.nn.functional.pad(flat, (0, padding)) if padding else flat, group=group)
        return share

    def vectors(self, kind: Kind, values: Tensor) -> Tensor:
        """[n, P] partial gradients -> [n]: all-reduced over TP and CP, then squared; zeros except on the first rank.

        Shards are all-reduced over CP only, and counted on each TP rank.
        """
        if kind is Kind.PARTIAL:
            self.over_tensor(values)
        self.over_context(values)
        norms = row_sq_norms(values)
        counted = self.parallel.cp_rank == 0 and (kind is Kind.SHARD or self.parallel.tp_rank == 0)
        return norms if counted else torch.zeros_like(norms)

    def over_tensor(self, values: Tensor) -> None:
        """All-reduce over the tensor-parallel ranks, in place."""
        all_reduce(values, self.parallel.tp_group)

    def over_context(self, values: Tensor) -> None:
        """All-reduce over the ranks that share the sequences, in place."""
        all_reduce(values, self.parallel.cp_group)

    def rows(self, rows: EmbeddingRows, num_samples: int) -> Tensor:
        """[n]: ||E||^2 if it is taken from the rows, plus 2 <E, H> of a tied embedding; counted on the first stage."""
        norms = torch.zeros(num_samples, dtype=torch.float64, device=self.parallel.device)
        for part in (rows.embedding, rows.head):
            if part is not None:
                self.over_context(part)
        head = rows.head
        if self.parallel.pp_size > 1 and (head is not None or rows.tied):
            head = self.from_last_stage(rows)
        if rows.embedding is not None and self.parallel.cp_rank == 0:
            sample = to_device(rows.sample, norms.device)
            if rows.squares:
                norms.index_add_(0, sample, row_dots(rows.embedding, rows.embedding))
            if head is not None:
                norms.index_add_(0, sample, self.cross_term(rows.embedding, head))
        return norms

    def cross_term(self, embedding: Tensor, head: Tensor) -> Tensor:
        """[r, h] x [r, h] -> [r]: each row's contribution to 2 <E, H>."""
        return 2.0 * row_dots(embedding, head)

    def from_last_stage(self, rows: EmbeddingRows) -> Tensor:
        """H's rows [r, h], broadcast from the last stage to the first.

        The embedding group joins the first and last stage's ranks that hold the same vocabulary shard.
        """
        group = self.parallel.embedding_group
        assert group is not None, "a stage with a tied embedding belongs to no embedding group"
        last = dist.get_process_group_ranks(group)[-1]
        head = rows.head
        if head is None:
            assert rows.embedding is not None, "this stage has neither the embedding nor the output layer"
            head = torch.empty_like(rows.embedding)
        dist.broadcast(head, src=last, group=group)
        return head

    def total(self, norms: Tensor) -> Tensor:
        """All-reduce [n, block] over the ranks of the replica, or of the block if replicas share experts."""
        all_reduce(norms, self.parallel.block_group)
        return norms
