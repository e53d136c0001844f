"""Norms of single samples' gradients, and sums of these gradients with weights, for any per-sample loss.

    w_i = ||grad_theta loss_i||^2 over all trainable parameters of the whole model
    g   = sum_i c_i grad_theta loss_i,   c_i given, computed from all w, or min(1, C / sqrt(w_i))

| mode       | how                                                                  | c may depend on w |
|------------|----------------------------------------------------------------------|-------------------|
| `two_pass` | a pass for w, then an ordinary one with the loss sum_i c_i loss_i    | yes               |
| `bookkeep` | one pass; keeps x and dy of every layer until c is known             | yes               |
| `stash`    | one pass; keeps each sample's whole gradient until c is known        | yes               |
| `inline`   | one pass; keeps nothing                                              | no                |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal, cast, get_args, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oblr_megatron.errors import UserError
from oblr_megatron.model.sequence import single_samples
from oblr_megatron.model.step import reduce_model_parallel_grads, run_schedule
from oblr_megatron.model.tapped import TappedModel
from oblr_megatron.norms.attach import scheduled, tapped
from oblr_megatron.norms.own_gradients import OwnGradients, gradient_space
from oblr_megatron.norms.rules import classify, untapped_aside
from oblr_megatron.norms.sample_gradients import GradSum, GroupWeights, Mode, SampleGradients, checked_weights
from oblr_megatron.runtime.collectives import all_reduce
from oblr_megatron.types import TokenBatch

Records = dict[str, Tensor]
Loss = Callable[[Tensor, Any], Tensor | tuple[Tensor, Records]]
"""(output [b, t, V / tp] of the model, this rank's part of the microbatch) -> losses [n] of its samples.

Called on the last pipeline stage. Tensor-parallel ranks return the same losses. Under context parallelism each rank has
a part of the tokens. It returns their part of the loss: for a sum over tokens, the sum over its own tokens.

It may also return (losses, record): detached tensors of its own, which `weighted_grad_sum` returns with `records`.
"""
Weights = Callable[[Tensor], Tensor]
"""Squared norms [n] fp64 -> weights [n]."""
Model = nn.Module | Sequence[nn.Module] | TappedModel


def per_sample_sq_grad_norms(
    model: Model, microbatches: Sequence[TokenBatch], loss: Loss, *, mode: Mode = "two_pass"
) -> Tensor:
    """||grad_theta loss_i||^2 of every sample, over all trainable parameters of the whole model.

    Every rank of a replica calls it with the same microbatches. Replicas have their own samples; where they share
    experts they need the same number. Weights and gradients are unchanged.

    Args:
        model: as for `tapped`, or its handle, which saves the taps' installation at every call.
        microbatches: best in host memory, with whole sequences. The library pads them and cuts them over ranks. It
            splits them into single samples where some layer cannot tell samples apart.
        loss: the samples' losses, see `Loss`.
        mode: "stash" forms each sample's gradient and squares it; the others never form one.

    Returns:
        [n] fp64 in the order of the microbatches' samples, the same on every rank of the replica.

    Raises:
        UserError: the model or its layout is not supported; the handle's `with` block has ended; a token id is outside
            the vocabulary; or the loss has another shape.
    """
    with _prepared(model, microbatches, mode, summed=False) as (_, gradients, given):
        loss_of = partial(_total, loss, None)
        if mode != "stash":
            return gradients.sq_norms(given.batches, loss_of)
        nothing = torch.zeros(len(given.tokens), dtype=torch.float64)
        return gradients.add(given, range(len(nothing)), loss_of, nothing, 1).sq_norms


@overload
def weighted_grad_sum(
    model: Model,
    microbatches: Sequence[TokenBatch],
    loss: Loss,
    weights: Tensor | Weights | GroupWeights,
    *,
    mode: Mode = ...,
    groups: int | None = ...,
    window_tokens: int | None = ...,
    records: Literal[False] = ...,
) -> Tensor: ...


@overload
def weighted_grad_sum(
    model: Model,
    microbatches: Sequence[TokenBatch],
    loss: Loss,
    weights: Tensor | Weights | GroupWeights,
    *,
    mode: Mode = ...,
    groups: int | None = ...,
    window_tokens: int | None = ...,
    records: Literal[True],
) -> tuple[Tensor, list[Records]]: ...


def weighted_grad_sum(
    model: Model,
    microbatches: Sequence[TokenBatch],
    loss: Loss,
    weights: Tensor | Weights | GroupWeights,
    *,
    mode: Mode = "two_pass",
    groups: int | None = None,
    window_tokens: int | None = None,
    records: bool = False,
) -> Tensor | tuple[Tensor, list[Records]]:
    """Add sum_i c_i grad_theta loss_i to the gradients; returns the squared norms as `per_sample_sq_grad_norms` does.

    Inside DistributedDataParallel the sum is added to `main_grad`, as by a backward pass without reductions; call
    `finalize_model_grads` next, as always. A model without it gets the sum over the replica's ranks in `.grad`.

    Args:
        model, microbatches, loss: as in `per_sample_sq_grad_norms`.
        weights: c [n] of all samples, or a function of their squared norms. A sample with c = 0 is left out, even if
            its gradient is not finite. Where replicas share experts, its logits must be finite.
        mode: see above. "stash" keeps the gradients of a group, "bookkeep" the factors of a window.
        groups: G; each G samples in order are a group, and a function of the norms is a `GroupWeights`: it gets the
            norms of some groups as soon as they are known. None: all samples are one group; with a tensor of weights
            each is one, except in a pipeline.
        window_tokens: a window of mode "bookkeep" has whole groups, at least one, otherwise at most so many tokens.
            None: all samples.
        records: also return the loss's records, for each microbatch in the order of the pass, on the last stage.
            "two_pass" returns those of the second pass, which leaves out samples with c = 0.

    Raises:
        UserError: mode "inline" with a function, a weight is not finite, the samples are not whole groups, or as in
            `per_sample_sq_grad_norms`.
    """
    if mode == "inline" and not isinstance(weights, torch.Tensor):
        raise UserError(
            "mode 'inline' needs the weights before it knows the norms",
            where="weighted_grad_sum",
            fix="use 'bookkeep', 'stash' or 'two_pass'",
        )
    with _prepared(model, microbatches, mode, summed=True, window_tokens=window_tokens) as (handle, gradients, given):
        count = len(given.tokens)
        alone = isinstance(weights, torch.Tensor) and handle.parallel.pp_size == 1  # no weight waits for a norm
        size = (1 if alone else max(1, count)) if groups is None else groups
        if size < 1 or count % size:
            what = f"{count} samples are not whole groups of {size}"
            raise UserError(what, where="groups", fix="give every group all its samples on each replica")
        c = _rule(weights, grouped=groups is not None)
        if isinstance(c, torch.Tensor):
            c = checked_weights(c, (count,)).cpu()
        if mode == "two_pass":
            total = _two_pass(handle, gradients, given, loss, c, size)
        else:
            total = gradients.add(given, range(count), partial(_total, loss, None), c, size)
        if any(isinstance(chunk, OwnGradients) for chunk in handle.chunks):
            reduce_model_parallel_grads(handle)
        return (total.sq_norms, total.records) if records else total.sq_norms


def clipped_grad_sum(
    model: Model, microbatches: Sequence[TokenBatch], loss: Loss, max_norm: float, *, mode: Mode = "two_pass"
) -> Tensor:
    """`weighted_grad_sum` with c_i = min(1, max_norm / ||grad_i||), as in DP-SGD (arXiv 1607.00133, Algorithm 1).

    A sample with a norm that is not finite has c = 0. Noise is the caller's: see docs/norms_library.md.

    Raises:
        UserError: max_norm is not above 0, or as in `weighted_grad_sum`.
    """
    if not 0 < max_norm < math.inf:
        raise UserError(f"max_norm is {max_norm}", where="clipped_grad_sum", fix="give a finite number above 0")

    def clipped(_: Sequence[int], sq_norms: Tensor) -> Tensor:
        scale = (max_norm / sq_norms.sqrt()).clamp(max=1.0)  # 1 for a norm of 0
        return torch.where(sq_norms.isfinite(), scale, 0.0)

    return weighted_grad_sum(model, microbatches, loss, clipped, mode=mode, groups=1)  # c_i reads only its own norm


class _Given:
    """The microbatches of a call, with its samples numbered in order (`Samples` of sample_gradients.py)."""

    def __init__(self, batches: Sequence[TokenBatch]) -> None:
        starts = accumulate((batch.num_samples for batch in batches), initial=0)
        self.batches = [
            replace(batch, sample_index=torch.arange(start, start + batch.num_samples))
            for batch, start in zip(batches, starts, strict=False)
        ]
        self.tokens = [tokens for batch in batches for tokens in _lengths(batch)]

    def microbatches(self, numbers: Sequence[int], *, single: bool) -> list[TokenBatch]:
        """The microbatches as they are; single samples of those that also hold others."""
        chosen, batches = set(numbers), list[TokenBatch]()
        for batch in self.batches:
            assert batch.sample_index is not None, "set above"
            own = batch.sample_index.tolist()
            if chosen.issuperset(own) and not (single and len(own) > 1):
                batches.append(batch)
            elif not chosen.isdisjoint(own):
                batches += [part for n, part in zip(own, single_samples(batch), strict=True) if n in chosen]
        return batches


def _lengths(batch: TokenBatch) -> list[int]:
    """Tokens of each sample, padding included."""
    if batch.cu_seqlens is not None:
        return [int(length) for length in batch.cu_seqlens.diff().tolist()]
    return [batch.input_ids.shape[1]] * batch.num_samples


def _rule(weights: Tensor | Weights | GroupWeights, *, grouped: bool) -> Tensor | GroupWeights:
    """The weights, or a function of groups; without groups all samples are one."""
    if isinstance(weights, torch.Tensor) or grouped:
        return cast("Tensor | GroupWeights", weights)  # `groups` says which of the two functions it is
    of_all = cast("Weights", weights)
    return lambda _, norms: of_all(norms[0])[None]


def _two_pass(
    model: TappedModel,
    gradients: SampleGradients,
    given: _Given,
    loss: Loss,
    weights: Tensor | GroupWeights,
    size: int,
) -> GradSum:
    """A pass for the norms, then an ordinary one with the weights in the loss.

    It leaves out samples with weight 0: their loss may not be finite, and 0 * NaN is NaN. Replicas that share experts
    need the same number of microbatches and keep all, here of one sample each; `_total` gives these a gradient of 0.
    """
    norms = gradients.sq_norms(given.batches, partial(_total, loss, None))
    if not isinstance(weights, torch.Tensor) and not len(norms):  # as drawn by Poisson sampling
        weights = norms
    if not isinstance(weights, torch.Tensor):
        shape = (len(norms) // size, size)
        weights = checked_weights(weights(range(shape[0]), norms.view(shape)), shape).flatten().cpu()
    used = range(len(norms)) if model.parallel.block_size > 1 else weights.nonzero().flatten().tolist()
    loss_of = partial(_total, loss, weights.to(norms.device))
    config = model.modules[0].config
    # In the first microbatch of a run, Transformer Engine's fused FP8 layers overwrite what was accumulated.
    overwrites = config.fp8 and config.gradient_accumulation_fusion
    with untapped_aside(classify(model)) if overwrites else nullcontext():
        records = run_schedule(model, given.microbatches(used, single=False), loss_of)
    return GradSum(norms, weights, records)


@contextmanager
def _prepared(
    model: Model,
    microbatches: Sequence[TokenBatch],
    mode: Mode,
    *,
    summed: bool,
    window_tokens: int | None = None,
) -> Iterator[tuple[TappedModel, SampleGradients, _Given]]:
    """The tapped model, with room for gradients, the passes of the mode, and the numbered samples."""
    with nullcontext(model) if isinstance(model, TappedModel) else tapped(model) as handle:
        if not handle.tap.installed:
            fix = "call it inside the block, or give it the model"
            raise UserError("the handle is used after its `with tapped(...)` block", where="model", fix=fix)
        _check_mode(mode, handle)
        if summed:
            _check_averaging(handle)
        if torch.is_autocast_enabled(handle.parallel.device.type):
            fix = "call it outside of torch.autocast; a bf16 model keeps its fp32 main_grad"
            raise UserError("a layer's input and output would have two dtypes", where="torch.autocast", fix=fix)
        batches = list(microbatches)
        _check_ids(handle, batches)
        gradients = SampleGradients(handle, mode, window_tokens=window_tokens)
        if gradients.single:
            batches = [single for batch in batches for single in single_samples(batch)]
        _check_counts(handle, len(batches))
        with scheduled(handle), gradient_space(handle, summed=summed):
            yield handle, gradients, _Given(batches)


def _check_averaging(model: TappedModel) -> None:
    """Refuse a wrapper that divides by the context-parallel size, or although the configuration asks for sums.

    DistributedDataParallel reads calculate_per_token_loss when it is built. Without it, the wrapper divides by DP x CP,
    and megatron-core's schedule multiplies the loss by CP only if the loss is a mean.
    """
    for chunk in model.chunks:
        if isinstance(chunk, OwnGradients):
            continue
        buffers = (*chunk.buffers, *chunk.expert_parallel_buffers)
        divides = chunk.ddp_config.average_in_collective or any(one.gradient_scaling_factor != 1 for one in buffers)
        if divides and (model.parallel.cp_size > 1 or model.transformer_config.calculate_per_token_loss):
            raise UserError(
                "the data-parallel wrapper divides sums by the number of data- and context-parallel ranks",
                where="DistributedDataParallel",
                fix="set calculate_per_token_loss = True in the TransformerConfig before you wrap the model",
            )


def _check_ids(model: TappedModel, batches: Sequence[TokenBatch]) -> None:
    """The tapped embedding takes an id that no rank has as one that another rank has."""
    size = model.modules[0].vocab_size
    for batch in batches:
        if batch.input_ids.numel() and not 0 <= int(batch.input_ids.min()) <= int(batch.input_ids.max()) < size:
            what = f"a token id is outside the vocabulary of {size}"
            raise UserError(what, where="microbatches", fix="tokenize with the model's own tokenizer")
        if batch.cu_seqlens is not None:
            bounds, whole = batch.cu_seqlens.tolist(), list(batch.input_ids.shape)
            if whole[0] != 1 or bounds[:1] != [0] or bounds[-1:] != whole[1:] or bounds != sorted(bounds):
                what = f"cu_seqlens {bounds} do not cut the {whole[0]} row of {whole[1]} tokens into samples"
                fix = "give one row, and ascending bounds from 0 to its length"
                raise UserError(what, where="microbatches", fix=fix)


def _check_counts(model: TappedModel, count: int) -> None:
    """Replicas that share experts go through their layers together."""
    parallel = model.parallel
    if parallel.block_size == 1:
        return
    bounds = torch.tensor([count, -count], device=parallel.device)
    all_reduce(bounds, parallel.block_group, dist.ReduceOp.MAX)
    most, least = int(bounds[0]), -int(bounds[1])
    if most != least:
        raise UserError(
            f"replicas that share experts have {least} to {most} microbatches",
            where="microbatches",
            fix="give each replica the same number of samples; one with an empty mask counts as 0",
        )


def _total(loss: Loss, factors: Tensor | None, output: Tensor, batch: TokenBatch) -> tuple[Tensor, Records]:
    """The sum of the samples' losses, each times its factor; samples with factor 0 are left out."""
    returned = loss(output, batch)
    values, record = returned if isinstance(returned, tuple) else (returned, {})
    if values.shape != (batch.num_samples,):
        raise UserError(
            f"the loss has shape {tuple(values.shape)} for {batch.num_samples} samples",
            where="loss",
            fix="return one value a sample: [n]",
        )
    if factors is None:
        return values.sum(), record
    if not bool(factors[batch.sample_index].any()):  # kept for other replicas; the loss may be NaN, and 0 * NaN is NaN
        return 0 * output.sum(), record
    return (values * factors[batch.sample_index]).sum(), record


def _check_mode(mode: str, model: TappedModel) -> None:
    if mode == "bookkeep" and model.modules[0].config.fp8:
        raise UserError(
            "mode 'bookkeep' would keep a whole gradient of every sample: FP8 layers give no factors",
            where="mode",
            fix="use 'two_pass', or 'stash' with groups",
        )
    if mode not in get_args(Mode):
        raise UserError(f"there is no mode {mode!r}", where="mode", fix=f"use one of {', '.join(get_args(Mode))}")
    if mode != "two_pass" and model.parallel.block_size > 1:
        raise UserError(
            f"an expert's gradient mixes the samples of {model.parallel.block_size} replicas in mode {mode!r}",
            where="mode",
            fix="use 'two_pass', or lower expert_model_parallel_size",
        )
