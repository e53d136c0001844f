"""Taps: a layer's backward passes the two factors of its weight gradient to a sink, instead of multiplying them.

    dW = sum over tokens of dy x^T

From x and dy a sink can compute the norm of each sample's own dW, keep the factors for later, or add the product to
`main_grad` as ordinary training does. `install` taps megatron-core's linear layers, those of adapters, the embedding
and torch's norms; `te_taps.py` taps Transformer Engine's linear layers. Untapped parameters (Transformer Engine's
norms, a router, biases that are added outside of their layer) get their gradient from autograd, in `main_grad`.

    tap = Tap()
    install(model, tap, moe.splits_of(model, parallel, tap))
    with tap.into(sink):
        ...                       # backward calls sink.linear(weight, x, dy) and so on, instead of setting weight.grad
    tap.remove()                  # the modules are as before
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from oblr_megatron.model.cpu.shim import Replacements
from oblr_megatron.model.lora.linear import ReplicatedLinear
from oblr_megatron.model.megatron_versions import linear_forward
from oblr_megatron.model.norm_taps import torch_norms
from oblr_megatron.model.numerics import Operations

if TYPE_CHECKING:
    from oblr_megatron.model.lm_head import HeadFactors
    from oblr_megatron.types import TokenRows

Splits = Sequence[tuple[int, int]]
"""An expert's tokens as consecutive runs of (replica of the block, number of tokens)."""
SplitsFn = Callable[[], Splits]
"""Returns the splits of the current forward."""


class Sink(Protocol):
    """Receives the weight-gradient factors of each microbatch: b rows of t tokens, in megatron's layout [t, b, ...].

    `begin` and `end` enclose the backward of one microbatch through one model chunk. Backwards do not overlap.
    """

    def begin(self, position: int, chunk: int, batch: TokenRows) -> None:
        """The backward of microbatch number `position` through model chunk `chunk` starts."""

    def linear(self, weight: nn.Parameter, x: Tensor, dy: Tensor, splits: Splits | None = None) -> None:
        """dW = sum dy x^T: x [t, b, d] and dy [t, b, p] (an expert's: [tokens, d] and [tokens, p]), weight [p, d].

        The sink may keep both, and must not modify either. The tokens are those of this rank's whole sequence, even
        under sequence parallelism, except in a `ReplicatedLinear`. `splits` tells which replicas an expert's tokens
        come from; None: this rank's own.
        """

    def head(self, factors: HeadFactors, rows: slice, dy: Tensor) -> None:
        """A block of the output layer's gradient: dW[rows] = dy^T x with x of the factors [n, h], dy [n, rows].

        Called for each block of `factors.rows()` in order. `factors.blocks()` makes them again, later.
        """

    def embedding(self, weight: nn.Parameter, rows: Tensor, dy: Tensor) -> None:
        """dW[r] = sum of dy with rows = r: rows [b, t] int64, -1 if another rank holds the token; dy [b, t, h]."""

    def scale(self, weight: nn.Parameter, terms: Tensor) -> None:
        """dW = sum of the terms over all dimensions but the last: [t, b, h] (t / tp under SP) or [t, b, heads, h].

        The terms are dy * x_hat for a norm's weight, and dy for a bias. The sink must not modify them.
        """

    def end(self, position: int, chunk: int) -> None:
        """All factors of this microbatch and chunk were passed, and untapped gradients are in `main_grad`."""


class DropSink:
    """Drops every gradient: that of a filler in the interleaved schedule, which is zero."""

    def begin(self, position: int, chunk: int, batch: TokenRows) -> None: ...
    def linear(self, weight: nn.Parameter, x: Tensor, dy: Tensor, splits: Splits | None = None) -> None: ...
    def head(self, factors: HeadFactors, rows: slice, dy: Tensor) -> None: ...
    def embedding(self, weight: nn.Parameter, rows: Tensor, dy: Tensor) -> None: ...
    def scale(self, weight: nn.Parameter, terms: Tensor) -> None: ...
    def end(self, position: int, chunk: int) -> None: ...


class AccumulateSink(DropSink):
    """The sink of ordinary training: adds every gradient to `main_grad`."""

    def linear(self, weight: nn.Parameter, x: Tensor, dy: Tensor, splits: Splits | None = None) -> None:
        """main_grad += dy^T x."""
        add_product(main_grad(weight), x, dy)

    def head(self, factors: HeadFactors, rows: slice, dy: Tensor) -> None:
        """main_grad[rows] += dy^T x."""
        add_product(main_grad(factors.weight)[rows], factors.x, dy)

    def embedding(self, weight: nn.Parameter, rows: Tensor, dy: Tensor) -> None:
        """main_grad[rows] += dy."""
        add_rows(main_grad(weight), rows, dy)

    def scale(self, weight: nn.Parameter, terms: Tensor) -> None:
        """main_grad += sum of the terms."""
        target = main_grad(weight)
        target.add_(terms.flatten(0, -2).sum(0, dtype=target.dtype))


class Tap(Replacements):
    """Connects the tapped modules of a rank to the current sink."""

    def __init__(self, operations: Operations | None = None) -> None:
        super().__init__()
        self.sink: Sink = AccumulateSink()
        self.operations = operations  # from which linear layers, norms and log-probs take their values
        self.weights: set[int] = set()  # ids of the tapped parameters

    @contextmanager
    def into(self, sink: Sink | None) -> Iterator[None]:
        """Use this sink inside the context; None for that of ordinary training."""
        before, self.sink = self.sink, sink or AccumulateSink()
        try:
            yield
        finally:
            self.sink = before

    @property
    def installed(self) -> bool:
        """Whether modules are tapped."""
        return bool(self.weights)

    def remove(self) -> None:
        """Restore all tapped modules."""
        self.restore()
        self.weights.clear()


def install(module: nn.Module, tap: Tap, splits: Mapping[nn.Module, Sequence[SplitsFn]]) -> None:
    """Tap every module of this model chunk that can be tapped. Frozen parameters are skipped during forward.

    `splits` of experts' layers come from `moe.splits_of`.
    """
    for child in module.modules():
        if isinstance(child, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
            tap.replace(child, "_forward_impl", partial(_linear, tap, child._forward_impl, splits.get(child)))
            inside = child.bias if isinstance(child, ColumnParallelLinear) and not child.skip_bias_add else None
            tap.weights.update(id(held) for held in (child.weight, inside) if held is not None)
        elif isinstance(child, VocabParallelEmbedding):
            tap.replace(child, "forward", partial(_embedding, tap, child))
            tap.weights.add(id(child.weight))
    for norm, forward in torch_norms(module, tap):
        tap.replace(norm, "forward", forward)
        tap.weights.update(id(held) for held in norm.parameters())


def main_grad(weight: nn.Parameter) -> Tensor:
    """The parameter's view into megatron's gradient buffer."""
    return weight.main_grad  # type: ignore[attr-defined]  # set by the data-parallel wrapper


def add_product(target: Tensor, x: Tensor, dy: Tensor, factor: float = 1.0) -> None:
    """target [p, d] += factor * dy^T x, summed over the tokens of all rows."""
    x, dy = x.flatten(0, -2), dy.flatten(0, -2)
    if target.dtype == x.dtype:
        target.addmm_(dy.t(), x, alpha=factor)
    elif x.is_cuda:  # a product in half precision would be rounded before it is added
        target.add_(torch.mm(dy.t(), x, out_dtype=target.dtype), alpha=factor)
    else:
        target.add_(dy.t() @ x, alpha=factor)


def add_rows(target: Tensor, rows: Tensor, dy: Tensor) -> None:
    """target[r] += dy of the tokens with row r; tokens with row -1 belong to other ranks."""
    others = (rows < 0)[..., None]
    grads = dy.masked_fill(others, 0.0)  # to row 0, because a selection would wait for the GPU
    target.index_add_(0, rows.clamp(min=0).flatten(), grads.flatten(0, -2).to(target.dtype))


def _linear(
    tap: Tap,
    original: Any,
    splits: Sequence[SplitsFn] | None,
    input: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    **options: Any,
) -> Tensor:
    """megatron-core's linear layer with tapped gradients of the weight and of a bias that the layer itself adds."""
    if weight.requires_grad:
        output = _TappedLinear.apply(
            input,
            weight,
            tap,
            None if splits is None else splits[0](),
            options["allreduce_dgrad"],
            options["sequence_parallel"],
            options["tp_group"],
        )
    else:
        output = original(input=input, weight=weight, bias=None, **options)
    if bias is None:
        return output
    return _TappedBias.apply(output, bias, tap) if bias.requires_grad else output + bias


class _TappedBias(torch.autograd.Function):
    """output [t, b, p] + bias [p]."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, bias: nn.Parameter, tap: Tap) -> Tensor:
        ctx.bias, ctx.tap = bias, tap
        return output + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.tap.sink.scale(ctx.bias, dy)
        return dy, None, None


class _TappedLinear(torch.autograd.Function):
    """megatron-core's `LinearWithGradAccumulationAndAsyncCommunication`: the same forward and input gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: nn.Parameter,
        tap: Tap,
        splits: Splits | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        group: Any,
    ) -> Tensor:
        output = linear_forward(ctx, input, weight, allreduce_dgrad, sequence_parallel, group)
        if tap.operations:
            output = tap.operations.linear(input, weight)
        ctx.weight, ctx.tap = weight, tap  # the parameter itself: backward may see another object in saved_tensors
        ctx.splits = splits
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None, None, None, None]:
        input, weight = ctx.saved_tensors
        group = ctx.tp_group
        x, gather = input, None
        if ctx.sequence_parallel:  # into new memory: the next layer overwrites megatron's scratch buffer
            x = input.new_empty((input.shape[0] * group.size(), *input.shape[1:]))
            gather = dist.all_gather_into_tensor(x, input.contiguous(), group=group, async_op=True)
        dx = dy.matmul(weight)
        if gather is not None:
            gather.wait()
        pending = None
        if ctx.allreduce_dgrad:
            pending = dist.all_reduce(dx, group=group, async_op=True)
        elif ctx.sequence_parallel:
            part = torch.empty_like(input)
            pending = dist.reduce_scatter_tensor(part, dx.contiguous(), group=group, async_op=True)
            dx = part
        ctx.tap.sink.linear(ctx.weight, x, dy, ctx.splits)  # overlaps with the reduction of dx
        if pending is not None:
            pending.wait()
        return dx, None, None, None, None, None, None


def _embedding(tap: Tap, module: VocabParallelEmbedding, ids: Tensor) -> Tensor:
    """megatron-core's vocabulary-parallel embedding with a tapped weight gradient: [b, t] -> [b, t, h].

    With a scattered output (sequence parallelism) the result is [t / tp, b, h].
    """
    start, stop = module.vocab_start_index, module.vocab_end_index
    rows = torch.where((ids >= start) & (ids < stop), ids - start, -1)
    output = _TappedEmbedding.apply(module.weight, rows, tap)
    if module.reduce_scatter_embeddings:
        return reduce_scatter_to_sequence_parallel_region(output.transpose(0, 1).contiguous(), group=module.tp_group)
    return reduce_from_tensor_model_parallel_region(output, group=module.tp_group)


class _TappedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, rows: Tensor, tap: Tap) -> Tensor:
        ctx.weight, ctx.tap = weight, tap
        ctx.save_for_backward(rows)
        return nn.functional.embedding(rows.clamp(min=0), weight).masked_fill_((rows < 0)[..., None], 0.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        ctx.tap.sink.embedding(ctx.weight, ctx.saved_tensors[0], dy)
        return None, None, None
