"""The passes of a mode over chosen samples, with all that they keep from call to call.

The public functions (`norms/api.py`) and the trainer (`gradient/step_gradient.py`) both call these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist

from oblr_megatron.errors import UserError
from oblr_megatron.memory.buffer_sizes import KEPT_BYTES
from oblr_megatron.norms.bookkeep import keep_factors
from oblr_megatron.norms.buffer import GradientBuffer, add_weighted
from oblr_megatron.norms.inline import add_inline
from oblr_megatron.norms.reduce import Reducer
from oblr_megatron.norms.rules import classify
from oblr_megatron.norms.stash import stash_gradients
from oblr_megatron.norms.two_pass import pipeline_runs, rules_need_single_samples, sq_grad_norms
from oblr_megatron.runtime.collectives import all_reduce
from oblr_megatron.runtime.device_copy import to_device

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.model.step import LossFn
    from oblr_megatron.model.tapped import TappedModel

Mode = Literal["two_pass", "bookkeep", "stash", "inline"]
GroupWeights = Callable[[Sequence[int], "Tensor"], "Tensor"]
"""(numbers of k groups, squared norms [k, G] fp64 of their samples) -> weights [k, G]. Group k has samples k G to
k G + G - 1. Called on every rank of the replica with equal norms; returns the same weights on each."""


class Samples(Protocol):
    """The N samples of a call. A pass asks for microbatches of some of them."""

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens of each sample [N]."""

    def microbatches(self, numbers: Sequence[int], *, single: bool) -> list[Any]:
        """Microbatches of these samples, of one sample each if `single`; `sample_index` has their numbers."""


@dataclass(frozen=True, slots=True)
class GradSum:
    """Norms, weights and loss records of a call."""

    sq_norms: Tensor  # [N] fp64 on the model's device; 0 for samples that were not asked for
    weights: Tensor  # [N] fp64 on the CPU, as above
    records: list[dict[str, Tensor]]  # what the loss records of each microbatch; on the last pipeline stage

    def put(self, numbers: Tensor, sq_norms: Tensor) -> None:
        """Set the norms [k] of the samples with these numbers [k], which are in host memory."""
        self.sq_norms.index_copy_(0, to_device(numbers, sq_norms.device), sq_norms)


class SampleGradients:
    """Norms and weighted sums of single samples' gradients, for one model and one mode.

    Args:
        model: with taps; its frozen parameters stay frozen.
        mode: of `add`.
        window_tokens: mode `bookkeep` keeps the factors of at most so many tokens, and of at least one group; None: of
            all samples of a call.

    Raises:
        UserError: no rule covers a trainable parameter.
    """

    def __init__(self, model: TappedModel, mode: Mode, *, window_tokens: int | None = None) -> None:
        self.mode = mode
        self._model, self._window_tokens = model, window_tokens
        self._rules, self._reducer = classify(model), Reducer(model.parallel)
        self._buffers: list[GradientBuffer] = []
        shared = model.parallel.block_size > 1  # norms are summed over replicas, which must agree on their number
        alone = torch.tensor(int(rules_need_single_samples(self._rules)), device=model.parallel.device)
        all_reduce(alone, model.parallel.replica_group, dist.ReduceOp.MAX)  # the stages of a pipeline may differ
        self.single = mode == "stash" or shared or bool(alone)
        """Whether the microbatches of a pass must hold one sample each."""

    def release(self) -> None:
        """Free the gradient buffers that mode `stash` keeps between calls."""
        self._buffers = []

    def sq_norms(self, microbatches: Sequence[Any], loss_of: LossFn) -> Tensor:
        """[n] fp64 in the order of the microbatches' samples: `two_pass.sq_grad_norms`."""
        return sq_grad_norms(self._model, microbatches, loss_of, rules=self._rules, reducer=self._reducer)

    def add(
        self,
        samples: Samples,
        numbers: Sequence[int],
        loss_of: LossFn,
        weights: Tensor | GroupWeights,
        group_size: int,
        stash_size: int | None = None,
    ) -> GradSum:
        """main_grad += sum_i c_i grad_theta loss_i over some samples, in one pass; collective over the replica.

        Args:
            samples: of the call.
            numbers: of the samples to add: whole groups, in order.
            loss_of: the sum of the samples' losses, with records.
            weights: c [N] fp64 on the CPU, or a function that is called for some groups once their norms are known. A
                sample with c = 0 is left out, even if its gradient is not finite.
            group_size: G.
            stash_size: gradients that mode `stash` holds at once, G by default. 1 if no weight reads another's
                norm: `weights` is then called for a group with one known norm, and 0 for the others.
        """
        assert self.mode != "inline" or isinstance(weights, torch.Tensor), "mode inline needs the weights first"
        count = len(samples.tokens)
        norms = torch.zeros(count, dtype=torch.float64, device=self._model.parallel.device)
        known = weights if isinstance(weights, torch.Tensor) else torch.zeros(count, dtype=torch.float64)
        total = GradSum(norms, known, [])

        def weigh(chosen: Sequence[int]) -> None:
            """Ask for the weights of the samples, in order, which have all the norms that these read."""
            if not isinstance(weights, torch.Tensor):
                groups = list(dict.fromkeys(n // group_size for n in chosen))
                of_groups = norms.view(-1, group_size).index_select(0, to_device(torch.tensor(groups), norms.device))
                asked = checked_weights(weights(groups, of_groups), (len(groups), group_size)).cpu()
                rows = [groups.index(n // group_size) for n in chosen]
                known[list(chosen)] = asked[rows, [n % group_size for n in chosen]]

        match self.mode:
            case "inline":
                self._inline(samples, numbers, loss_of, total)
            case "bookkeep":
                for window in self._windows(samples, numbers, group_size):
                    self._bookkeep(samples, window, loss_of, total, weigh)
            case "stash":
                for group in groups_of(numbers, stash_size or group_size):
                    self._stash(samples, group, loss_of, total, weigh)
            case _:
                raise AssertionError(f"mode {self.mode} takes two passes")
        return total

    def _inline(self, samples: Samples, numbers: Sequence[int], loss_of: LossFn, total: GradSum) -> None:
        microbatches = samples.microbatches(numbers, single=self.single)
        for run in pipeline_runs(self._model, microbatches, self._rules, KEPT_BYTES):
            order = numbers_of(run)
            norms, records = add_inline(self._model, run, loss_of, total.weights[order], self._rules, self._reducer)
            total.put(order, norms)
            total.records.extend(records)

    def _bookkeep(
        self,
        samples: Samples,
        window: Sequence[int],
        loss_of: LossFn,
        total: GradSum,
        weigh: Callable[[Sequence[int]], None],
    ) -> None:
        microbatches = samples.microbatches(window, single=self.single)
        norms, records, sink = keep_factors(self._model, microbatches, loss_of, self._rules, self._reducer)
        order = numbers_of(microbatches)
        total.put(order, norms)
        weigh(window)
        total.records.extend(records)
        sink.add_gradient(total.weights[order])

    def _stash(
        self,
        samples: Samples,
        group: Sequence[int],
        loss_of: LossFn,
        total: GradSum,
        weigh: Callable[[Sequence[int]], None],
    ) -> None:
        self._buffers += [GradientBuffer(self._model) for _ in range(len(group) - len(self._buffers))]
        microbatches = samples.microbatches(group, single=True)
        norms, records = stash_gradients(self._model, microbatches, loss_of, self._rules, self._reducer, self._buffers)
        order = numbers_of(microbatches)
        total.put(order, norms)
        weigh(group)
        total.records.extend(records)
        add_weighted(self._model, self._buffers[: len(group)], total.weights[order].tolist())

    def _windows(self, samples: Samples, numbers: Sequence[int], group_size: int) -> Iterator[list[int]]:
        """Windows of whole groups: at least one group, otherwise at most `window_tokens` tokens."""
        window: list[int] = []
        held = 0
        for group in groups_of(numbers, group_size):
            tokens = sum(samples.tokens[n] for n in group)
            if window and self._window_tokens is not None and held + tokens > self._window_tokens:
                yield window
                window, held = [], 0
            window, held = window + group, held + tokens
        if window:
            yield window


def groups_of(numbers: Sequence[int], size: int) -> list[list[int]]:
    """Split samples into groups."""
    assert len(numbers) % size == 0, f"{len(numbers)} samples are not whole groups of {size}"
    return [list(numbers[start : start + size]) for start in range(0, len(numbers), size)]


def numbers_of(microbatches: Sequence[Any]) -> Tensor:
    """[n] int64 on the CPU: the numbers of the microbatches' samples, in order."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(batch.sample_index.cpu() for batch in microbatches)])


def checked_weights(weights: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The weights as fp64.

    Raises:
        UserError: another shape, or a weight that is not finite.
    """
    if weights.shape != shape:
        raise UserError(
            f"the weights have shape {tuple(weights.shape)} where {shape} are asked for",
            where="weights",
            fix="give one weight a sample",
        )
    wrong = weights.isfinite().logical_not().flatten().nonzero().flatten().tolist()
    if wrong:
        what = f"the weight of sample {wrong[0]} is {float(weights.flatten()[wrong[0]])}"
        raise UserError(what, where="weights", fix="give finite weights; 0 leaves a sample out")
    return weights.to(torch.float64)
