"""Buffered rows of the embedding's gradient E, at the tokens of each sample.

E is zero except in the rows of the sample's own tokens. If the output layer is tied to the embedding, its gradient H
has the same shape, and

    ||E + H||^2 = ||E||^2 + ||H||^2 + 2 <E, H>

<E, H> needs only these rows of H, whether E and H are on one rank or on the first and last pipeline stage. Under
context parallelism the rows are partial sums over the ranks that share the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oblr_megatron.families import EMBEDDING, OUTPUT
from oblr_megatron.norms.rules import Kind, Rule
from oblr_megatron.runtime.device_copy import to_device

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.types import TokenRows


@dataclass(slots=True)
class EmbeddingRows:
    """Rows of E and H, one for each pair (sample, token of the sample in this rank's vocabulary shard).

    The pairs are in host memory, so that no lookup waits for a GPU.

    Example, vocabulary shard [8, 16) and samples (9, 3, 9) and (15, 8):
        sample [0, 1, 1]  row [1, 0, 7]  embedding [[..of token 9], [..of 8], [..of 15]]
    """

    sample: Tensor  # [r] int64 slot, ascending
    row: Tensor  # [r] int64 row of the shard, ascending within a sample
    embedding: Tensor | None  # [r, h] rows of E; None if this rank has no embedding
    head: Tensor | None  # [r, h] rows of H; None unless this rank has a tied output layer
    shard: int  # tokens in this rank's vocabulary shard
    squares: bool  # ||E||^2 is taken from these rows
    tied: bool

    @classmethod
    def of(
        cls, rules: Sequence[Rule], batches: Sequence[TokenRows], parallel: Parallel, *, squares: bool
    ) -> EmbeddingRows | None:
        """Allocate the rows of these microbatches' samples; None on a rank that needs none, and without samples."""
        embedding, head = _uses(rules, parallel)
        if not squares and parallel.pp_size == 1:
            return None  # E was squared whole, with H already added
        held = embedding or head
        if held is None or not batches:
            return None
        grad, slot = held.grad, 0
        samples, rows = [], []
        for batch in batches:
            numbers, local = touched_rows(batch, len(grad), parallel.tp_rank)
            samples.append(numbers + slot)
            rows.append(local)
            slot += batch.num_samples
        sample, row = (torch.cat(parts) for parts in (samples, rows))
        wide = torch.promote_types(grad.dtype, torch.float32)  # a wrapper may add gradients up in bf16

        def zeros() -> Tensor:
            return grad.new_zeros(len(row), grad.shape[1], dtype=wide)

        return cls(
            sample=sample,
            row=row,
            embedding=None if embedding is None else zeros(),
            head=None if head is None else zeros(),
            shard=len(grad),
            squares=squares,
            tied=held.tied,
        )

    @staticmethod
    def bytes_of(rules: Sequence[Rule], batch: TokenRows, parallel: Parallel) -> int:
        """Bytes that this rank buffers for one microbatch."""
        uses = [use for use in _uses(rules, parallel) if use is not None]
        if not uses:
            return 0
        _, rows = touched_rows(batch, len(uses[0].grad), parallel.tp_rank)
        return len(rows) * uses[0].grad.shape[1] * wide_bytes(uses[0].grad) * len(uses)

    def span(self, first: int, last: int) -> slice:
        """The slice of rows that belong to the slots [first, last)."""
        return slice(*torch.searchsorted(self.sample, torch.tensor([first, last])).tolist())

    def add_embedding(self, sample: Tensor, row: Tensor, grads: Tensor) -> None:
        """Add gradients [k, h] to the rows given as pairs (sample, row) of [k] each; other pairs have zeros."""
        assert self.embedding is not None, "this rank has no embedding"
        if not len(self.row):
            return
        keys, pairs = to_device(self.sample * self.shard + self.row, grads.device), sample * self.shard + row
        index = torch.searchsorted(keys, pairs).clamp_(max=len(keys) - 1)
        strange = (keys[index] != pairs)[:, None]
        torch._assert_async((strange & (grads != 0)).any().logical_not(), "a token of no sample")
        self.embedding.index_add_(0, index, grads.to(self.embedding.dtype))


def wide_bytes(grad: Tensor) -> int:
    """Bytes of an element in buffers of gradients, which are at least fp32."""
    return max(grad.element_size(), torch.float32.itemsize)


def touched_rows(batch: TokenRows, shard: int, tp_rank: int) -> tuple[Tensor, Tensor]:
    """Rows of rank `tp_rank`'s vocabulary shard (`shard` tokens) at the tokens of each sample and at padding (token 0).

    Returns:
        sample [r] int64 in the microbatch, row [r] int64; each pair once, ascending, on the CPU.

    Example, tokens (9, 3, 9, 15) and (8, 8), shard=8, tp_rank=1 -> ([0, 0, 1], [1, 7, 0])
    """
    samples, ids = torch.arange(batch.num_samples), batch.input_ids.cpu()
    stride = int(ids.max()) + 1
    keys = batch.per_token(samples) * stride + ids
    keys = torch.cat((samples * stride, keys.flatten())).unique()
    row = keys % stride - tp_rank * shard
    held = (row >= 0) & (row < shard)
    return (keys // stride)[held], row[held]


def needs_rows(rule: Rule, parallel: Parallel) -> bool:
    """Whether the rows of this embedding or output layer must be buffered."""
    if rule.kind is Kind.FROZEN:
        return False
    return rule.tied or (rule.name == EMBEDDING and parallel.cp_size > 1)


def _uses(rules: Sequence[Rule], parallel: Parallel) -> tuple[Rule | None, Rule | None]:
    """This rank's (embedding, output layer) with buffered rows, or None; a tied weight is both if PP = 1."""
    kept = {rule.name: rule for rule in rules if needs_rows(rule, parallel)}
    embedding, head = kept.get(EMBEDDING), kept.get(OUTPUT)
    if embedding is not None and embedding.tied and parallel.pp_size == 1:
        head = embedding
    return embedding, head
