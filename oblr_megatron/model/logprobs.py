"""Log-probabilities, entropies and energies of tokens, with the vocabulary split over tensor-parallel ranks.

    log pi(a) = z_a / T - log sum_v exp(z_v / T),   v over the real vocabulary only

Padding rows of the vocabulary have no probability and get no gradient, even on a rank that holds only padding.
Everything is computed in fp32, or in fp64 for fp64 logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.memory.buffer_sizes import ENTROPY_ROWS
from oblr_megatron.model.numerics import Operations
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.runtime.collectives import all_reduce


def vocab_parallel_logprobs(
    logits: Tensor,  # [b, t, Vp / tp], Vp the padded vocabulary
    labels: Tensor,  # [b, t] int64, global token ids below vocab_size
    *,
    vocab_size: int,
    parallel: Parallel,
    temperature: float = 1.0,
    operations: Operations | None = None,
) -> Tensor:
    """log pi of each label, [b, t], differentiable with respect to the logits.

    `operations` (model.batch_invariant) need the whole vocabulary on each rank.

    Memory besides the logits: one [b, t, Vp / tp] tensor (the softmax) until backward, and one more (the gradient, in
    the logits' dtype) during backward.
    """
    return _VocabParallelLogprobs.apply(logits, labels, vocab_size, parallel, temperature, operations)


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        parallel: Parallel,
        temperature: float,
        operations: Operations | None,
    ) -> Tensor:
        start, stop = _vocab_range(logits.shape[-1], vocab_size, parallel)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        scores = _scaled(logits, temperature)
        if operations:
            logprobs = operations.log_softmax_at(scores[..., :vocab_size], labels).to(scores.dtype)
            scores[..., vocab_size:] = -torch.inf
            ctx.save_for_backward(scores.softmax(-1), labels, torch.ones_like(labels, dtype=torch.bool))
            return logprobs
        scores[..., stop - start :] = -torch.inf
        largest = scores.amax(dim=-1)
        all_reduce(largest, parallel.tp_group, dist.ReduceOp.MAX)
        scores.sub_(largest.unsqueeze(-1))

        is_local = (labels >= start) & (labels < stop)
        local_labels = torch.where(is_local, labels - start, 0)
        at_label = scores.gather(-1, local_labels.unsqueeze(-1)).squeeze(-1).masked_fill(~is_local, 0.0)
        probabilities = scores.exp_()
        totals = torch.stack([at_label, probabilities.sum(dim=-1)])
        all_reduce(totals, parallel.tp_group)
        at_label, normaliser = totals
        probabilities.div_(normaliser.unsqueeze(-1))

        ctx.save_for_backward(probabilities, local_labels, is_local)
        return at_label - normaliser.log()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """d log pi(a) / d z_v = ([v = a] - pi(v)) / T."""
        probabilities, local_labels, is_local = ctx.saved_tensors
        scale = (grad_output / ctx.temperature).unsqueeze(-1)
        grad = torch.empty_like(probabilities, dtype=ctx.dtype)
        torch.mul(probabilities, -scale, out=grad)
        index = local_labels.unsqueeze(-1)
        # Not grad.scatter_add_: in bf16 the sum of the two terms would be rounded twice.
        at_label = (1.0 - probabilities.gather(-1, index)) * scale
        kept = torch.where(is_local.unsqueeze(-1), at_label.to(ctx.dtype), grad.gather(-1, index))
        return grad.scatter_(-1, index, kept), None, None, None, None, None


@torch.no_grad()
def vocab_parallel_entropy(
    logits: Tensor,  # [b, t, Vp / tp]
    *,
    vocab_size: int,
    parallel: Parallel,
    temperature: float = 1.0,
) -> Tensor:
    """Entropy at each position in nats, [b, t], without gradient: H = log Z - sum_v pi(v) s_v with s = z / T."""
    normaliser, mean = _moments(logits, vocab_size, parallel, temperature)
    return normaliser - mean


@torch.no_grad()
def vocab_parallel_energy(
    logits: Tensor,  # [b, t, Vp / tp]
    labels: Tensor,  # [b, t] int64
    *,
    vocab_size: int,
    parallel: Parallel,
    temperature: float = 1.0,
) -> Tensor:
    """||d log pi(a) / d z||^2 = (1 - 2 pi(a) + sum_v pi(v)^2) / temperature^2 of each label a, [b, t]; no gradient.

    This is the squared norm of the score at the logits. Optimal Token Baselines use it in place of the norm over all
    parameters (arXiv 2602.07078).
    """
    options: dict[str, Any] = {"vocab_size": vocab_size, "parallel": parallel, "temperature": temperature}
    of_label = vocab_parallel_logprobs(logits, labels, **options).exp()
    # sum_v pi^2 = sum_v e^(2 s_v) / Z^2, and 2 s is the score at half the temperature.
    single, double = (_moments(logits, vocab_size, parallel, temperature / scale)[0] for scale in (1.0, 2.0))
    energy = 1 - 2 * of_label + (double - 2 * single).exp()
    return energy.clamp(min=0) / temperature**2  # rounding makes it negative where pi(a) is close to 1


def _moments(logits: Tensor, vocab_size: int, parallel: Parallel, temperature: float) -> tuple[Tensor, Tensor]:
    """(log Z, sum_v pi(v) s_v), [b, t] each, with s = z / T over all ranks' columns. In blocks of rows, for memory."""
    start, stop = _vocab_range(logits.shape[-1], vocab_size, parallel)
    rows = logits.flatten(0, -2)
    local = [_local_moments(part[:, : stop - start], temperature) for part in rows.split(ENTROPY_ROWS)]
    largest, total, weighted = (torch.cat(parts) for parts in zip(*local, strict=True))
    shared = largest.clone()
    all_reduce(shared, parallel.tp_group, dist.ReduceOp.MAX)
    sums = torch.stack([total, weighted]) * (largest - shared).exp()
    all_reduce(sums, parallel.tp_group)
    shape = logits.shape[:-1]
    return (sums[0].log() + shared).view(shape), (sums[1] / sums[0]).view(shape)


def _local_moments(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Over this rank's columns: the largest score, and the sums of e and e * score with e = exp(score - largest)."""
    scores = _scaled(logits, temperature)
    if scores.shape[-1] == 0:  # a rank that holds only padding
        none = scores.new_zeros(scores.shape[0])
        return none - torch.inf, none, none
    largest = scores.amax(dim=-1)
    exponentials = (scores - largest.unsqueeze(-1)).exp_()
    return largest, exponentials.sum(dim=-1), (exponentials * scores).sum(dim=-1)


def _vocab_range(columns: int, vocab_size: int, parallel: Parallel) -> tuple[int, int]:
    """Global ids [start, stop) of the real tokens in this rank's columns; empty if they are all padding."""
    start = parallel.tp_rank * columns
    return start, max(start, min(start + columns, vocab_size))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature as a new fp32 or fp64 tensor."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.div(logits.detach().to(dtype), temperature)
