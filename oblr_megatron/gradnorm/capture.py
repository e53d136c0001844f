"""The end of a sample's backward: its gradient, as far as this rank has it, becomes a few numbers, and is wiped.

With one sample in a microbatch the ordinary weight gradient in `main_grad` is the sample's gradient, or this rank's
part of it. What can be squared at once is; what must first be summed over ranks is put aside until the pass is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.gradnorm.kernels import scratch_for, sq_norm
from oblr_megatron.gradnorm.rules import Kind, Rule

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Captured:
    """What one rank took down of n samples.

    Example, n = 2, a TP rank with 16 elements of partial gradients and no tied embedding:
        Captured(sq_norms=[0.3, 1.2], partials=[[...16], [...16]], tied_rows=None)
    """

    sq_norms: Tensor  # [n] fp64, of the elements that this rank counts as they are
    partials: list[Tensor]  # for each gradient buffer [n, P], summands of gradients to be completed over TP
    tied_rows: TiedRows | None  # where the other end of the pipeline holds a copy of the embedding


@dataclass(slots=True)
class TiedRows:
    """Rows of one copy's embedding gradient, at the tokens that occur in each sample.

    ||E_first + E_last||^2 needs <E_first, E_last>, and E_first is zero but in the rows of the sample's own tokens: both
    ends know these, so only these rows are kept. Example, vocabulary shard [8, 16) and samples (9, 3, 9) and (15, 8):
        rows=[[...] of token 9, [...] of 8, [...] of 15], sample=[0, 1, 1]
    """

    rows: Tensor  # [r, hidden], dtype of the gradient
    sample: Tensor  # [r] int64, the sample each row belongs to


class _Buffer:
    """One contiguous gradient buffer, and which of its elements are not counted as they stand."""

    def __init__(self, buffer: Any, rules: Sequence[Rule], num_samples: int, *, counts_copies: bool) -> None:
        self.grad: Tensor = buffer.grad_data
        mine = [rule for rule in rules if rule.param in buffer.param_index_map]
        self.partial = self._indices(buffer, [rule for rule in mine if rule.kind is Kind.PARTIAL])  # [P]
        copies = self._indices(buffer, [rule for rule in mine if rule.kind is Kind.COPY and not counts_copies])
        self.excluded = torch.cat((self.partial, copies))
        self.put_aside = self.grad.new_zeros(num_samples, len(self.partial))  # [n, P]
        self._scratch = scratch_for(self.grad)

    def _indices(self, buffer: Any, rules: Sequence[Rule]) -> Tensor:
        spans = [torch.arange(*buffer.param_index_map[rule.param][:2]) for rule in rules]
        return torch.cat([torch.empty(0, dtype=torch.int64), *spans]).to(self.grad.device)

    def take(self, sample: int) -> Tensor:
        """The fp64 sum of squares of what is counted; the summands are put aside, the buffer is zero afterwards."""
        if len(self.partial):
            torch.index_select(self.grad, 0, self.partial, out=self.put_aside[sample])
        if len(self.excluded):
            self.grad.index_fill_(0, self.excluded, 0.0)
        total = sq_norm(self.grad, self._scratch)
        self.grad.zero_()
        return total


class MaterializeEngine:
    """Call it with the number of a sample when that sample's gradient stands in `main_grad`.

    Args:
        buffers: megatron's contiguous gradient buffers of this rank; wiped after each sample.
        rules: what the gradients in them are.
        tokens: for each sample [t] the ids that went in, on any device; padding among them does no harm.
        tp_rank: tensor-parallel rank; 0 counts the gradients that all of them have, r holds shard r of the vocabulary.
        device: where the norms are kept.
    """

    def __init__(
        self,
        buffers: Sequence[Any],
        rules: Sequence[Rule],
        tokens: Sequence[Tensor],
        tp_rank: int,
        device: torch.device,
    ) -> None:
        self._buffers = [_Buffer(buffer, rules, len(tokens), counts_copies=tp_rank == 0) for buffer in buffers]
        self._sq_norms = torch.zeros(len(tokens), dtype=torch.float64, device=device)
        tied = _tied_grad(rules)
        self._tied = None if tied is None else _TiedEngine(tied, tokens, tp_rank)

    def __call__(self, sample: int) -> None:
        """Take down sample number `sample` (of this pass) and leave the buffers zero."""
        if self._tied is not None:
            self._tied.keep(sample)
        for buffer in self._buffers:
            self._sq_norms[sample] += buffer.take(sample)

    def captured(self) -> Captured:
        """What was taken down of all samples."""
        partials = [buffer.put_aside for buffer in self._buffers]
        return Captured(self._sq_norms, partials, None if self._tied is None else self._tied.captured())


class _TiedEngine:
    """Keeps the rows of one embedding gradient [Vp/tp, hidden] that `TiedRows` asks for."""

    def __init__(self, grad: Tensor, tokens: Sequence[Tensor], tp_rank: int) -> None:
        self._grad = grad
        local = [touched_rows(ids, len(grad), tp_rank) for ids in tokens]
        ends = torch.tensor([len(rows) for rows in local]).cumsum(0).tolist()
        self._spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self._local = [rows.to(grad.device) for rows in local]
        self._rows = grad.new_zeros(ends[-1], grad.shape[1])

    def keep(self, sample: int) -> None:
        start, end = self._spans[sample]
        torch.index_select(self._grad, 0, self._local[sample], out=self._rows[start:end])

    def captured(self) -> TiedRows:
        counts = torch.tensor([end - start for start, end in self._spans], device=self._rows.device)
        return TiedRows(self._rows, torch.repeat_interleave(counts))


def touched_rows(ids: Tensor, shard: int, tp_rank: int) -> Tensor:
    """Rows of rank `tp_rank`'s vocabulary shard (`shard` tokens) that occur in `ids`: ascending, each once, on the CPU.

    Example: touched_rows(tensor([9, 3, 9, 15]), shard=8, tp_rank=1) -> [1, 7]
    """
    rows = torch.unique(ids.cpu()) - tp_rank * shard
    return rows[(rows >= 0) & (rows < shard)]


def bytes_put_aside(rules: Sequence[Rule], ids: Tensor, tp_rank: int) -> int:
    """Memory that this rank's `Captured` takes for the sample with these ids, without the norm itself."""
    partials = sum(rule.grad.nbytes for rule in rules if rule.kind is Kind.PARTIAL)
    tied = _tied_grad(rules)
    return partials + (0 if tied is None else len(touched_rows(ids, len(tied), tp_rank)) * tied[0].nbytes)


def _tied_grad(rules: Sequence[Rule]) -> Tensor | None:
    """The gradient [Vp/tp, hidden] of this stage's embedding, where the other end of the pipeline has a copy of it."""
    return next((rule.grad for rule in rules if rule.tied and rule.kind is not Kind.FROZEN), None)
