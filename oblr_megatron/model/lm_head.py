"""The output layer: log-probs, entropies and energies of labels, in blocks of the vocabulary.

    z = x W^T,   log pi(a) = z_a / T - log sum_v exp(z_v / T),   v over the real vocabulary only

The logits of all tokens and the whole vocabulary never exist at once. Only the tokens of the mask are multiplied.
Forward goes through the rows of W in blocks, and combines their sums; tensor-parallel ranks do so once, at the end.
Backward makes the same blocks again, those that do not fit in `KEPT_LOGITS`, and turns each into dy:

    dx += dy W[rows],   dW[rows] = dy^T x,   dy_v = sum_a ([v = a] - pi(v)) / T times the gradient of log pi(a)

a is a token's label and, where a caller names them, further tokens of the vocabulary (`algo/centering.py`).

Where a microbatch knows which tokens could be drawn (`MicroBatch.supported`), the others have no probability and no
gradient: pi is the policy renormalised over them, as the engine sampled from it.

A block has all tokens, so its dW[rows] is complete: a sink measures it as a layer of its own, and the squares of the
blocks add up. Padding rows of the vocabulary have no probability and no gradient, even on a rank with only padding.

Memory besides x and dx: a few blocks of `BLOCK_LOGITS` elements and `KEPT_LOGITS`, for any number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from oblr_megatron.memory.buffer_sizes import BLOCK_LOGITS, KEPT_LOGITS
from oblr_megatron.model.sequence import counted_tokens
from oblr_megatron.model.taps import Tap, add_product
from oblr_megatron.runtime.collectives import all_reduce
from oblr_megatron.runtime.device_copy import to_device

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from oblr_megatron.model.numerics import Operations
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.types import TokenRows


EXCLUDED = -1e30
"""Score of a token that could not be drawn: its exponential is 0, and sums of it times 0 stay numbers."""


class TokenScores(NamedTuple):
    """Values of each label a, [b, t], fp32 or fp64; 0 where the mask is False, or if they were not asked for.

    The energy ||d log pi(a) / d z||^2 = (1 - 2 pi(a) + sum_v pi(v)^2) / T^2 is the squared norm of the score at the
    logits. Optimal Token Baselines use it in place of the norm over all parameters (arXiv 2602.07078).
    """

    logprobs: Tensor  # differentiable
    entropy: Tensor  # log Z - sum_v pi(v) z_v / T, nats; without gradient
    energy: Tensor  # without gradient
    others: Tensor | None = None  # [b, t, k] log-probs of the further tokens that were asked for; differentiable


@dataclass(slots=True)
class LMHead:
    """The output layer of the last pipeline stage.

    The model's own forward ends before it (`install_head`): a loss function receives hidden states [b, t, h], of all
    tokens of this rank's part, and calls this.
    """

    weight: nn.Parameter  # [Vp / tp, h]
    vocab_size: int  # without padding
    parallel: Parallel
    tap: Tap
    dtype: torch.dtype  # of the logits
    block_elements: int
    kept_elements: int

    def __call__(
        self,
        hidden: Tensor,
        batch: TokenRows,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        energy: bool = False,
        others: Tensor | None = None,
    ) -> TokenScores:
        """The scores of the microbatch's labels, the same on every tensor-parallel rank.

        Only labels of the mask are read; they must be below `vocab_size`. `others` [b, t, k] are further tokens at each
        position, different from each other; one may be the label.
        """
        flat, shape = hidden.flatten(0, 1), hidden.shape[:2]
        counted = counted_tokens(batch)
        bounds, index = _bounds(counted, batch), to_device(counted, flat.device)
        x, labels = flat.index_select(0, index), batch.labels.flatten()[index, None]
        if others is not None:
            labels = torch.cat([labels, others.flatten(0, 1)[index].to(labels.dtype)], dim=1)
        # The same on ranks that share the sequence: they sum each block's gradient, and may differ in response tokens.
        columns = max(1, min(len(self.weight), self.block_elements // max(1, len(flat))))
        support = _support(batch, index)
        factors = HeadFactors(self, x.detach(), labels, bounds, columns, temperature, support)
        values = _Scores.apply(x, self.weight, factors, torch.is_grad_enabled(), entropy, energy)

        def placed(v: Tensor) -> Tensor:
            return v.new_zeros(len(flat), *v.shape[1:]).index_copy(0, index, v).view(*shape, *v.shape[1:])

        logprobs, entropies, energies = map(placed, values)
        return TokenScores(logprobs[..., 0], entropies, energies, None if others is None else logprobs[..., 1:])

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., h] -> [.., Vp / tp] at once, for a few tokens; without gradient."""
        x, weight = hidden.detach().flatten(0, -2), self.weight.detach()
        exact = self.tap.operations
        logits = exact.linear(x.to(self.dtype), weight.to(self.dtype)) if exact else product(x, weight, self.dtype)
        return logits.view(*hidden.shape[:-1], -1)


def install_head(module: GPTModel, tap: Tap, parallel: Parallel, vocab_size: int, dtype: torch.dtype) -> LMHead:
    """Let the model's forward end with the input of the output layer, and return what computes the rest.

    The input is that of `ColumnParallelLinear`: whole sequences on every tensor-parallel rank. Its gradient is summed
    over these ranks: with sequence parallelism by the gathering's backward, else by `_Scores`, for the tokens of the
    mask only.
    """

    def forward(x: Tensor, **_: Any) -> tuple[Tensor, None]:
        if parallel.sequence_parallel:
            return gather_from_sequence_parallel_region(x, group=parallel.tp_group), None
        return x, None

    tied = module.share_embeddings_and_output_weights
    weight = module.shared_embedding_or_output_weight() if tied else module.output_layer.weight
    tap.replace(module.output_layer, "forward", forward)
    on_gpu = weight.is_cuda
    return LMHead(weight, vocab_size, parallel, tap, dtype, BLOCK_LOGITS[on_gpu], KEPT_LOGITS[on_gpu])


def product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x [n, h] times weight [p, h] transposed; from bf16 factors to fp32 without rounding if `dtype` says so."""
    if dtype == x.dtype:
        return x @ weight.t()
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return x.to(dtype) @ weight.to(dtype).t()  # torch has no such product on CPUs


def _support(batch: TokenRows, index: Tensor) -> tuple[Tensor, Tensor] | None:
    """(ids that could be drawn [n, k], whether no other could [n]) of the mask's tokens; None: unknown for all."""
    supported, ids = getattr(batch, "supported", None), getattr(batch, "recorded_ids", None)
    if supported is None or ids is None:
        return None
    possible = batch.recorded_logprobs > -torch.inf  # type: ignore[attr-defined]
    ids = torch.where(possible, ids, batch.labels[..., None].to(ids.dtype))  # a drawn token was possible
    return ids.flatten(0, 1)[index], supported.flatten()[index]


def _bounds(index: Tensor, batch: TokenRows) -> tuple[int, ...]:
    """Where each sample begins among the tokens of the mask, and the end. Both are in host memory."""
    rows, length = batch.mask.shape
    ends = torch.arange(rows + 1) * length if batch.cu_seqlens is None else batch.cu_seqlens
    return tuple(torch.searchsorted(index, ends.to(index)).tolist())


class HeadFactors:
    """The factors of the output layer's weight gradient dW = dy^T x, with dy in blocks of columns.

    Args:
        head: has the weight.
        x: [n, h], the tokens of the mask, sample after sample.
        labels: [n, 1 + k] global token ids; the first is the label, the others differ from each other.
        bounds: [samples + 1], where each sample begins in x.
        columns: of a block, at most.
        temperature: T.
        support: global ids of the tokens that could be drawn [n, k], and where no other could [n]; None: all could.
    """

    def __init__(
        self,
        head: LMHead,
        x: Tensor,
        labels: Tensor,
        bounds: tuple[int, ...],
        columns: int,
        temperature: float,
        support: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.head, self.x, self.bounds = head, x, bounds
        self._columns, self._temperature = columns, temperature
        first = head.parallel.tp_rank * len(head.weight)
        self._real = max(0, min(len(head.weight), head.vocab_size - first))  # rows before the padding
        self._labels = labels - first  # rows of this rank's weight; another rank's are outside
        self._support = None if support is None else (torch.cat([labels[:, :1], support[0]], 1) - first, support[1])
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # first row -> (largest score [n], exp(score - it))
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        self._largest = x.new_full((len(x),), -torch.inf, dtype=wide)
        self._total = x.new_zeros(len(x), dtype=wide)  # sum_v exp(score - largest)
        self._scale = self._total
        self._at_labels = x.new_zeros(labels.shape, dtype=wide)  # 1 - pi(a), then dy

    @property
    def weight(self) -> nn.Parameter:
        """[Vp / tp, h]"""
        return self.head.weight

    def rows(self) -> Iterator[slice]:
        """The rows of the weight, block after block; they include padding."""
        end = len(self.weight)
        return (slice(start, min(start + self._columns, end)) for start in range(0, end, self._columns))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, dy [n, rows] in the dtype of x) of every block, after `weigh`."""
        return ((rows, self.gradient(rows)) for rows in self.rows())

    def scores(self, *, keep: bool, entropy: bool, energy: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs [n, 1 + k], entropy and energy [n]; `keep` the blocks for backward as far as they fit."""
        weighted, squares = torch.zeros_like(self._total), torch.zeros_like(self._total)
        at_labels = self._at_labels
        room = self.head.kept_elements if keep else 0
        for rows in self.rows():
            scores = self._scores(rows)
            if scores.numel() == 0:
                continue
            inside, index = self._labels_in(rows)
            at_labels = torch.where(inside, scores.gather(1, index), at_labels)
            largest = scores.amax(dim=1)
            shifted = scores.sub_(largest[:, None])
            exponentials = shifted.exp() if entropy else shifted.exp_()
            sums = exponentials.sum(dim=1)
            common = torch.maximum(self._largest, largest)
            old, new = (self._largest - common).exp_(), (largest - common).exp_()
            self._largest, self._total = common, self._total * old + sums * new
            if entropy:
                weighted = weighted * old + (shifted.mul_(exponentials).sum(dim=1) + largest * sums) * new
            if energy:
                own, at = exponentials.gather(1, index[:, :1]), index[:, :1]
                exponentials.scatter_(1, at, torch.where(inside[:, :1], 0.0, own))
                norm = torch.linalg.vector_norm(exponentials, dim=1)  # of the other tokens
                exponentials.scatter_(1, at, own)
                squares = squares * old.square() + (norm * new).square()
            if exponentials.numel() <= room:
                room -= exponentials.numel()
                self._kept[rows.start] = largest, exponentials
        weighted, squares, at_labels = self._over_ranks(weighted, squares, at_labels)
        logs = self._total.log()
        logprobs = at_labels - logs[:, None]
        if self.head.tap.operations:
            logprobs[:, 0] = self._exact_logprobs(self.head.tap.operations)
        self._at_labels = -torch.expm1(logprobs)
        # (1 - pi(a))^2 + sum of the others' pi^2. 1 - 2 pi(a) + sum pi^2 would lose all digits where pi(a) is near 1.
        of_energy = torch.expm1(logprobs[:, 0]).square() + squares / self._total.square()
        of_energy /= self._temperature**2
        return (
            logprobs,
            self._largest + logs - weighted / self._total if entropy else torch.zeros_like(logs),
            of_energy if energy else torch.zeros_like(logs),
        )

    def weigh(self, grad: Tensor) -> None:
        """Set the gradient of the log-probs, [n, 1 + k]."""
        total = grad.sum(dim=1)
        self._scale = total / self._temperature
        twice = self._labels[:, 1:] == self._labels[:, :1]  # the label among the others: both columns get their sum
        own = torch.where(twice, grad[:, 1:], 0.0).sum(dim=1, keepdim=True)
        summed = torch.cat([grad[:, :1] + own, grad[:, 1:] + twice * grad[:, :1]], dim=1)
        apart = (summed - total[:, None]) / self._temperature  # 0 without others
        self._at_labels = self._at_labels * self._scale[:, None] + apart

    def gradient(self, rows: slice) -> Tensor:
        """dy [n, rows] of a block, in the dtype of x."""
        if rows.start in self._kept:
            largest, exponentials = self._kept.pop(rows.start)
            factor = (largest - self._largest).exp_()
        else:
            exponentials = self._scores(rows).sub_(self._largest[:, None]).exp_()
            factor = torch.ones_like(self._total)
        dy = self.x.new_empty(len(self.x), rows.stop - rows.start)
        real = exponentials.shape[1]
        torch.mul(exponentials, (-self._scale * factor / self._total)[:, None], out=dy[:, :real])
        dy[:, real:] = 0.0
        # Not scatter_add_: in bf16 the sum of the two terms would be rounded twice.
        inside, index = self._labels_in(rows)
        values = torch.where(inside, self._at_labels.to(dy.dtype), dy.gather(1, index))
        if index.shape[1] > 1:  # a label outside writes what one inside writes, or an old value
            one = inside.byte().argmax(dim=1, keepdim=True)
            index = torch.where(inside, index, index.gather(1, one))
            values = torch.where(inside, values, values.gather(1, one))
        return dy.scatter_(1, index, values)

    def _scores(self, rows: slice) -> Tensor:
        """z / T [n, columns] of the real tokens in a block, as a new fp32 or fp64 tensor."""
        stop = max(rows.start, min(rows.stop, self._real))
        logits = product(self.x, self.weight.detach()[rows.start : stop], self.head.dtype)
        scores = logits.to(self._total.dtype)
        scores = scores if self._temperature == 1 else scores.div_(self._temperature)
        return self._exclude(scores, slice(None), rows.start, EXCLUDED)

    def _exclude(self, scores: Tensor, tokens: slice, first: int, value: float) -> Tensor:
        """Write the value to scores [tokens, columns from `first` on] of the tokens that could not be drawn."""
        if self._support is None or scores.numel() == 0:
            return scores
        ids, known = (part[tokens] for part in self._support)
        inside = (ids >= first) & (ids < first + scores.shape[1])
        index = torch.where(inside, ids - first, 0)
        possible = scores.gather(1, index).masked_fill_(~inside, value)
        return scores.masked_fill_(known[:, None], value).scatter_reduce_(1, index, possible, "amax")

    def _labels_in(self, rows: slice) -> tuple[Tensor, Tensor]:
        """(whether the block has the labels, their columns, 0 where it does not): [n, 1 + k] each."""
        inside = (self._labels >= rows.start) & (self._labels < rows.stop)
        return inside, torch.where(inside, self._labels - rows.start, 0)

    def _over_ranks(self, weighted: Tensor, squares: Tensor, at_labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sums over the vocabulary, from those over this rank's part; the labels' scores less the largest."""
        group, shared = self.head.parallel.tp_group, self._largest.clone()
        all_reduce(shared, group, dist.ReduceOp.MAX)
        factor = (self._largest - shared).exp_()
        held = (self._labels >= 0) & (self._labels < self._real)
        at_labels = torch.where(held, at_labels - shared[:, None], 0.0)
        sums = torch.stack([self._total * factor, weighted * factor, squares * factor.square(), *at_labels.unbind(1)])
        all_reduce(sums, group)
        self._largest, self._total = shared, sums[0]
        return sums[1], sums[2], sums[3:].t()

    def _exact_logprobs(self, operations: Operations) -> Tensor:
        """The values of model.batch_invariant, which sum over a whole row of logits: in pieces of tokens."""
        step, wide = max(1, self.head.block_elements // len(self.weight)), self._total.dtype
        logprobs = torch.zeros_like(self._total)
        for start in range(0, len(self.x), step):
            tokens = slice(start, start + step)
            scores = self.head.logits(self.x[tokens])[:, : self._real].to(wide) / self._temperature
            scores = self._exclude(scores, tokens, 0, -torch.inf)
            logprobs[tokens] = operations.log_softmax_at(scores, self._labels[tokens, 0]).to(wide)
        return logprobs


class _Scores(torch.autograd.Function):
    """`HeadFactors.scores`, differentiable with respect to x and the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, factors: HeadFactors, keep: bool, entropy: bool, energy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.factors, ctx.weight = factors, weight  # the parameter itself: saved_tensors may return another object
        scores = factors.scores(keep=keep, entropy=entropy, energy=energy)
        ctx.mark_non_differentiable(*scores[1:])
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        factors: HeadFactors = ctx.factors
        del ctx.factors  # x would stay until the end of the whole backward
        weight, tap = ctx.weight, factors.head.tap
        tapped = id(weight) in tap.weights
        dw = torch.empty_like(weight) if weight.requires_grad and not tapped else None
        dx = torch.zeros_like(factors.x, dtype=grad.dtype)
        factors.weigh(grad)
        for rows, dy in factors.blocks():
            add_product(dx, weight.detach()[rows], dy.t())
            if dw is not None:
                torch.mm(dy.t(), factors.x, out=dw[rows])
            elif weight.requires_grad:
                tap.sink.head(factors, rows, dy)
        dx, parallel = dx.to(factors.x.dtype), factors.head.parallel
        if not parallel.sequence_parallel:
            all_reduce(dx, parallel.tp_group)
        return dx, dw, None, None, None, None
