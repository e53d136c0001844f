"""Mode `stash`: one pass that keeps the gradient of each response until its advantage is known.

The gradient of sample i is computed once, in its own buffer instead of `main_grad`, and its norm is taken there. Once
the norms of the group are known, sum_i A_i grad_i is summed from the buffers. There is no extra arithmetic: the cost is
k buffers of memory, and for every sample one write and two reads of a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oblr_megatron.families import EMBEDDING, OUTPUT
from oblr_megatron.model.step import run_schedule
from oblr_megatron.model.taps import add_product, add_rows
from oblr_megatron.norms.accumulate import NormAccumulator
from oblr_megatron.norms.buffer import GradientBuffer
from oblr_megatron.norms.products import product
from oblr_megatron.norms.rules import Kind, Rule, untapped_aside
from oblr_megatron.norms.segments import Segments, scale_grads
from oblr_megatron.runtime.device_copy import to_device

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from oblr_megatron.model.lm_head import HeadFactors
    from oblr_megatron.model.step import LossFn
    from oblr_megatron.model.tapped import TappedModel
    from oblr_megatron.model.taps import Splits
    from oblr_megatron.norms.reduce import Reducer
    from oblr_megatron.types import TokenRows


def stash_gradients(
    model: TappedModel,
    batches: Sequence[TokenRows],
    loss_of: LossFn,
    rules: Sequence[Rule],
    reducer: Reducer,
    kept: Sequence[GradientBuffer],
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The gradient of each microbatch's only sample, in `kept`; returns squared norms [n] fp64 and the loss's records.

    `main_grad` is unchanged. Arguments as in `sq_grad_norms` and `StashSink`.
    """
    accumulator = NormAccumulator(rules, batches, reducer, squares_rows=False)
    with untapped_aside(rules):
        sink = StashSink(rules, accumulator, kept)
        records = run_schedule(model, batches, loss_of, sink=sink)
        return reducer.finish(accumulator), records


class StashSink:
    """Writes the gradient of each microbatch's only sample into a buffer and measures its norm there.

    Args:
        rules: one for every parameter of this rank.
        accumulator: has a slot for each sample of this pipeline run.
        kept: a buffer for each sample of this pipeline run.
    """

    def __init__(self, rules: Sequence[Rule], accumulator: NormAccumulator, kept: Sequence[GradientBuffer]) -> None:
        self.rules = {id(rule.param): rule for rule in rules if rule.kind is not Kind.FROZEN}
        self.accumulator, self.kept = accumulator, kept
        self.slot = 0
        self._written: set[int] = set()  # ids of the parameters with a gradient of this sample

    def begin(self, position: int, chunk: int, batch: TokenRows) -> None:
        """Start the gradient of the microbatch's sample."""
        assert batch.num_samples == 1, "mode stash needs one sample a microbatch"
        self.slot = self.accumulator.first[position]
        self._written.clear()

    def linear(self, weight: Parameter, x: Tensor, dy: Tensor, splits: Splits | None = None) -> None:
        """Write the product; add it if the weight was used before (tied embeddings)."""
        view = self._view(weight)
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
        if id(weight) in self._written:
            add_product(view, x, dy)
        else:
            product(x, dy, view)
            self._written.add(id(weight))

    def head(self, factors: HeadFactors, rows: slice, dy: Tensor) -> None:
        """Write a block's product. Backward comes to the output layer first, so nothing is there yet."""
        view = self._view(factors.weight)
        product(factors.x, dy, view[rows])
        if rows.stop == len(view):
            self._written.add(id(factors.weight))

    def embedding(self, weight: Parameter, rows: Tensor, dy: Tensor) -> None:
        """Add the gradient rows."""
        view = self._view(weight)
        if id(weight) not in self._written:
            view.zero_()
            self._written.add(id(weight))
        add_rows(view, rows, dy)

    def scale(self, weight: Parameter, terms: Tensor) -> None:
        """Write the sum over tokens."""
        everything = Segments(1, (0, terms.shape[0] * terms.shape[1]))
        grads = scale_grads(terms.flatten(0, 1), everything)
        self._view(weight).copy_(grads[0])
        self._written.add(id(weight))

    def end(self, position: int, chunk: int) -> None:
        """Square the complete gradient."""
        for key, rule in self.rules.items():
            if rule.chunk != chunk:
                continue
            view = self._view(rule.param)
            if not rule.tapped:
                view.copy_(rule.grad)
                rule.grad.zero_()
            elif key not in self._written:
                view.zero_()  # an expert without tokens
            self._keep_rows(rule, view)
            self.accumulator.matrix(rule, self.slot, view)

    def _view(self, weight: Parameter) -> Tensor:
        return self.kept[self.slot].views[id(weight)]

    def _keep_rows(self, rule: Rule, view: Tensor) -> None:
        """Buffer a tied embedding's rows at the sample's tokens, if the other copy is on another stage."""
        rows = self.accumulator.rows
        if rows is None or not rule.tied:
            return
        span = rows.span(self.slot, self.slot + 1)
        row = to_device(rows.row[span], view.device)
        if rule.name == EMBEDDING and rows.embedding is not None:
            rows.embedding[span] = view.index_select(0, row)
        elif rule.name == OUTPUT and rows.head is not None:
            rows.head[span] = view.index_select(0, row)
