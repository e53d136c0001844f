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
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oblr_megatron.errors import UserError
from oblr_megatron.memory.buffer_sizes import KEPT_BYTES
from oblr_megatron.model.sequence import single_samples
from oblr_megatron.model.step import LossFn, reduce_model_parallel_grads, run_schedule
from oblr_megatron.model.tapped import TappedModel
from oblr_megatron.norms.attach import tapped
from oblr_megatron.norms.bookkeep import keep_factors
from oblr_megatron.norms.buffer import GradientBuffer, add_weighted
from oblr_megatron.norms.inline import add_inline
from oblr_megatron.norms.own_gradients import OwnGradients, gradient_space
from oblr_megatron.norms.reduce import Reducer
from oblr_megatron.norms.rules import classify
from oblr_megatron.norms.stash import stash_gradients
from oblr_megatron.norms.two_pass import pipeline_runs, rules_need_single_samples, sq_grad_norms
from oblr_megatron.runtime.collectives import all_reduce
from oblr_megatron.types import TokenBatch

Mode = Literal["two_pass", "bookkeep", "stash", "inline"]
Loss = Callable[[Tensor, Any], Tensor]
"""(output [b, t, V / tp] of the model, this rank's part of the microbatch) -> losses [n] of its samples.

Called on the last pipeline stage. Tensor-parallel ranks return the same losses. Under context parallelism each rank has
a part of the tokens. It returns their part of the loss: for a sum over tokens, the sum over its own tokens.
"""
Weights = Callable[[Tensor], Tensor]
"""Squared norms [n] fp64 -> weights [n]."""


def per_sample_sq_grad_norms(
    model: nn.Module | Sequence[nn.Module] | TappedModel,
    microbatches: Sequence[TokenBatch],
    loss: Loss,
    *,
    mode: Mode = "two_pass",
) -> Tensor:
    """||grad_theta loss_i||^2 of every sample, over all trainable parameters of the whole model.

    Every rank of a replica calls it with the same microbatches. Replicas have their own samples; where they share
    experts they need the same number. Weights and gradients are unchanged.

    Args:
        model: as for `tapped`, or its handle, which saves the taps' installation at every call.
        microbatches: on this rank's device, with whole sequences. The library pads them and cuts them over ranks. It
            splits them into single samples where some layer cannot tell samples apart.
        loss: the samples' losses, see `Loss`.
        mode: "stash" forms each sample's gradient and squares it; the others never form one.

    Returns:
        [n] fp64 in the order of the microbatches' samples, the same on every rank of the replica.

    Raises:
        UserError: the model or its layout is not supported; the handle's `with` block has ended; a token id is outside
            the vocabulary; or the loss has another shape.
    """
    with _prepared(model, microbatches, mode, summed=False) as (handle, batches):
        loss_of = partial(_total, loss, None)
        if mode != "stash":
            return sq_grad_norms(handle, batches, loss_of)
        rules, reducer, work = classify(handle), Reducer(handle.parallel), GradientBuffer(handle)
        runs = (stash_gradients(handle, [batch], loss_of, rules, reducer, [work], None)[0] for batch in batches)
        return torch.cat([_none(handle), *runs])


def weighted_grad_sum(
    model: nn.Module | Sequence[nn.Module] | TappedModel,
    microbatches: Sequence[TokenBatch],
    loss: Loss,
    weights: Tensor | Weights,
    *,
    mode: Mode = "two_pass",
) -> Tensor:
    """Add sum_i c_i grad_theta loss_i to the gradients; returns the squared norms as `per_sample_sq_grad_norms` does.

    Inside DistributedDataParallel the sum is added to `main_grad`, as by a backward pass without reductions; call
    `finalize_model_grads` next, as always. A model without it gets the sum over the replica's ranks in `.grad`.

    Args:
        model, microbatches, loss: as in `per_sample_sq_grad_norms`.
        weights: c [n] of all samples, or a function of their squared norms. A sample with c = 0 is left out, even if
            its gradient is not finite. Where replicas share experts, its logits must be finite.
        mode: see above. "stash" keeps n gradients, "bookkeep" the factors of all microbatches.

    Raises:
        UserError: mode "inline" with a function, a weight is not finite, or as in `per_sample_sq_grad_norms`.
    """
    if mode == "inline" and not isinstance(weights, torch.Tensor):
        raise UserError(
            "mode 'inline' needs the weights before it knows the norms",
            where="weighted_grad_sum",
            fix="use 'bookkeep', 'stash' or 'two_pass'",
        )
    with _prepared(model, microbatches, mode, summed=True) as (handle, batches):
        norms = _SUMS[mode](handle, batches, loss, weights)
        if any(isinstance(chunk, OwnGradients) for chunk in handle.chunks):
            reduce_model_parallel_grads(handle)
        return norms


def clipped_grad_sum(
    model: nn.Module | Sequence[nn.Module] | TappedModel,
    microbatches: Sequence[TokenBatch],
    loss: Loss,
    max_norm: float,
    *,
    mode: Mode = "two_pass",
) -> Tensor:
    """`weighted_grad_sum` with c_i = min(1, max_norm / ||grad_i||), as in DP-SGD (arXiv 1607.00133, Algorithm 1).

    A sample with a norm that is not finite has c = 0. Noise is the caller's: see docs/norms_library.md.

    Raises:
        UserError: max_norm is not above 0, or as in `weighted_grad_sum`.
    """
    if not 0 < max_norm < math.inf:
        raise UserError(f"max_norm is {max_norm}", where="clipped_grad_sum", fix="give a finite number above 0")

    def clipped(sq_norms: Tensor) -> Tensor:
        scale = (max_norm / sq_norms.sqrt()).clamp(max=1.0)  # 1 for a norm of 0
        return torch.where(sq_norms.isfinite(), scale, 0.0)

    return weighted_grad_sum(model, microbatches, loss, clipped, mode=mode)


def _two_pass(model: TappedModel, batches: Sequence[Any], loss: Loss, weights: Tensor | Weights) -> Tensor:
    norms = sq_grad_norms(model, batches, partial(_total, loss, None))
    factors = _factors(weights, len(norms), norms).to(norms.device)
    run_schedule(model, _used(model, batches, factors), partial(_total, loss, factors))
    return norms


def _bookkeep(model: TappedModel, batches: Sequence[Any], loss: Loss, weights: Tensor | Weights) -> Tensor:
    loss_of: LossFn = partial(_total, loss, None)
    norms, _, sink = keep_factors(model, batches, loss_of, classify(model), Reducer(model.parallel))
    sink.add_gradient(_factors(weights, len(norms), norms).cpu())
    return norms


def _stash(model: TappedModel, batches: Sequence[Any], loss: Loss, weights: Tensor | Weights) -> Tensor:
    kept = [GradientBuffer(model) for _ in batches]
    loss_of: LossFn = partial(_total, loss, None)
    norms, _ = stash_gradients(model, batches, loss_of, classify(model), Reducer(model.parallel), kept, None)
    add_weighted(model, kept, _factors(weights, len(norms), norms).tolist())
    return norms


def _inline(model: TappedModel, batches: Sequence[Any], loss: Loss, weights: Tensor | Weights) -> Tensor:
    rules, reducer, norms = classify(model), Reducer(model.parallel), [_none(model)]
    factors = _factors(weights, sum(batch.num_samples for batch in batches)).cpu()
    loss_of: LossFn = partial(_total, loss, None)
    for run in pipeline_runs(model, batches, rules, KEPT_BYTES):
        own = factors[torch.cat([batch.sample_index for batch in run]).cpu()]
        norms.append(add_inline(model, run, loss_of, own, rules, reducer)[0])
    return torch.cat(norms)


_SUMS = {"two_pass": _two_pass, "bookkeep": _bookkeep, "stash": _stash, "inline": _inline}


@contextmanager
def _prepared(
    model: nn.Module | Sequence[nn.Module] | TappedModel,
    microbatches: Sequence[TokenBatch],
    mode: Mode,
    *,
    summed: bool,
) -> Iterator[tuple[TappedModel, list[TokenBatch]]]:
    """The tapped model, with room for gradients, and its microbatches with numbered samples."""
    with nullcontext(model) if isinstance(model, TappedModel) else tapped(model) as handle:
        if not handle.tap.installed:
            fix = "call it inside the block, or give it the model"
            raise UserError("the handle is used after its `with tapped(...)` block", where="model", fix=fix)
        _check_mode(mode, handle)
        batches, count = list(microbatches), 0
        _check_ids(handle, batches)
        if mode == "stash" or rules_need_single_samples(classify(handle)):
            batches = [single for batch in batches for single in single_samples(batch)]
        for index, batch in enumerate(batches):
            numbers = torch.arange(count, count + batch.num_samples, device=batch.input_ids.device)
            batches[index] = replace(batch, sample_index=numbers)
            count += batch.num_samples
        _check_counts(handle, len(batches))
        with gradient_space(handle, summed=summed):
            yield handle, batches


def _check_ids(model: TappedModel, batches: Sequence[TokenBatch]) -> None:
    """The tapped embedding takes an id that no rank has as one that another rank has."""
    size = model.modules[0].vocab_size
    for batch in batches:
        if batch.input_ids.numel() and not 0 <= int(batch.input_ids.min()) <= int(batch.input_ids.max()) < size:
            what = f"a token id is outside the vocabulary of {size}"
            raise UserError(what, where="microbatches", fix="tokenize with the model's own tokenizer")


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


def _total(loss: Loss, factors: Tensor | None, output: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of the samples' losses, each times its factor; samples with factor 0 are left out."""
    values = loss(output, batch)
    if values.shape != (batch.num_samples,):
        raise UserError(
            f"the loss has shape {tuple(values.shape)} for {batch.num_samples} samples",
            where="loss",
            fix="return one value a sample: [n]",
        )
    if factors is None:
        return values.sum(), {}
    if not bool(factors[batch.sample_index].any()):  # kept by `_used`; the loss may be NaN, and 0 * NaN is NaN
        return 0 * output.sum(), {}
    return (values * factors[batch.sample_index]).sum(), {}


def _used(model: TappedModel, batches: Sequence[TokenBatch], factors: Tensor) -> list[TokenBatch]:
    """The microbatches without the samples with factor 0: their loss may not be finite, and 0 * NaN is NaN.

    Replicas that share experts need the same number of microbatches and keep all, here of one sample each. `_total`
    gives those with factor 0 a gradient of 0.
    """
    if model.parallel.block_size > 1:
        return list(batches)
    found: list[TokenBatch] = []
    for batch in batches:
        assert batch.sample_index is not None, "set by _prepared"
        used = factors[batch.sample_index] != 0
        if bool(used.all()):
            found.append(batch)
        else:
            found += [single for single, kept in zip(single_samples(batch), used.tolist(), strict=True) if kept]
    return found


def _factors(weights: Tensor | Weights, count: int, norms: Tensor | None = None) -> Tensor:
    """c [n] fp64 of `count` samples; a function is called with their squared norms."""
    if isinstance(weights, torch.Tensor):
        found = weights.to(torch.float64)
    else:
        assert norms is not None, "mode inline was refused"
        found = weights(norms).to(torch.float64)
    if found.shape != (count,):
        raise UserError(
            f"the weights have shape {tuple(found.shape)} for {count} samples",
            where="weights",
            fix="give one weight a sample: [n]",
        )
    wrong = found.isfinite().logical_not().nonzero().flatten().tolist()
    if wrong:
        what = f"the weight of sample {wrong[0]} is {float(found[wrong[0]])}"
        raise UserError(what, where="weights", fix="give finite weights; 0 leaves a sample out")
    return found


def _none(model: TappedModel) -> Tensor:
    return torch.zeros(0, dtype=torch.float64, device=model.parallel.device)


def _check_mode(mode: str, model: TappedModel) -> None:
    if mode not in get_args(Mode):
        raise UserError(f"there is no mode {mode!r}", where="mode", fix=f"use one of {', '.join(get_args(Mode))}")
    if mode != "two_pass" and model.parallel.block_size > 1:
        raise UserError(
            f"an expert's gradient mixes the samples of {model.parallel.block_size} replicas in mode {mode!r}",
            where="mode",
            fix="use 'two_pass', or lower expert_model_parallel_size",
        )
