"""Mode `two_pass`: a forward and backward of one sample a microbatch, before the pass that makes the policy gradient.

Costs one more forward and backward over the samples and no gradient memory of its own: `main_grad` is the scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from oblr_megatron.algo.loss import policy_gradient_loss
from oblr_megatron.gradnorm.capture import MaterializeEngine, bytes_put_aside
from oblr_megatron.gradnorm.reduce import Reducer
from oblr_megatron.gradnorm.rules import Rule, classify
from oblr_megatron.types import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.model.qwen3 import Policy

RatioFn = Callable[["Tensor", MicroBatch], tuple["Tensor", "Tensor"]]
"""Detached log-probs [b, t] and their batch -> importance ratios [b, t], and how many of them were cut."""

KEPT_BYTES = 2**29  # what a rank may put aside until ranks are summed (partials, rows of a tied embedding)


def sample_sq_grad_norms(
    policy: Policy,
    microbatches: Sequence[MicroBatch],
    *,
    temperature: float = 1.0,
    ratios: RatioFn | None = None,
    kept_bytes: int = KEPT_BYTES,
) -> Tensor:
    """w_i = ||grad_theta sum_t rho_t log pi(o_t)||^2 of every sample, over all trainable parameters.

    A collective of the replica: its TP x PP ranks all call it, with the same samples. Replicas need not agree.

    Args:
        policy: the model; weights are not touched, `main_grad` is overwritten and left zero.
        microbatches: one sample each, of any length.
        temperature: of the sampling distribution.
        ratios: the importance ratios of the score; without them every rho is 1.
        kept_bytes: bound on what a rank puts aside until ranks are summed; more samples than fit go in several runs of
            the pipeline.

    Returns:
        [n] fp64, the same on every rank of the replica, in order; 0 for an empty response, and not finite where the
        gradient is not.

    Raises:
        UserError: a trainable parameter that no rule covers.
    """
    parallel = policy.parallel
    rules = classify(
        [chunk.module for chunk in policy.chunks],
        tp_size=parallel.tp_size,
        sequence_parallel=parallel.sequence_parallel,
    )
    return measure(
        policy,
        microbatches,
        temperature=temperature,
        ratios=ratios,
        kept_bytes=kept_bytes,
        rules=rules,
        reducer=Reducer(parallel),
    )


def measure(
    policy: Policy,
    microbatches: Sequence[MicroBatch],
    *,
    temperature: float,
    ratios: RatioFn | None,
    kept_bytes: int,
    rules: Sequence[Rule],
    reducer: Reducer,
) -> Tensor:
    """`sample_sq_grad_norms` by the rules and the reducer given."""
    from oblr_megatron.model.step import run_schedule

    assert all(len(batch.input_ids) == 1 for batch in microbatches), "the norm pass takes one sample a microbatch"
    loss_of = _score(policy, temperature, ratios)
    parallel = policy.parallel
    buffers = [buffer for chunk in policy.chunks for buffer in chunk.buffers]
    policy.zero_grad()
    norms = [torch.zeros(0, dtype=torch.float64, device=parallel.device)]
    for samples in _runs(policy, microbatches, rules, kept_bytes):
        tokens = [batch.input_ids[0] for batch in samples]
        engine = MaterializeEngine(buffers, rules, tokens, parallel.tp_rank, parallel.device)
        run_schedule(policy, samples, loss_of, on_sample_backward_done=engine)
        norms.append(reducer.finish(engine.captured()))
    return torch.cat(norms)


def _score(
    policy: Policy, temperature: float, ratios: RatioFn | None
) -> Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]:
    """The loss whose gradient is minus the score of a microbatch's one sample."""
    from oblr_megatron.model.logprobs import vocab_parallel_logprobs

    def loss_of(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """logits [1, t, Vp/tp] -> scalar."""
        logprobs = vocab_parallel_logprobs(
            logits, batch.labels, vocab_size=policy.vocab_size, parallel=policy.parallel, temperature=temperature
        )  # [1, t]
        rho = torch.ones_like(logprobs) if ratios is None else ratios(logprobs.detach(), batch)[0]
        return policy_gradient_loss(logprobs, batch.mask, torch.ones(1, device=logprobs.device), rho), {}

    return loss_of


def _runs(
    policy: Policy, microbatches: Sequence[MicroBatch], rules: Sequence[Rule], kept_bytes: int
) -> Iterator[Sequence[MicroBatch]]:
    """Cut the samples into runs of the pipeline that put aside no more than `kept_bytes` on any rank of the replica."""
    parallel = policy.parallel
    largest = max((bytes_put_aside(rules, b.input_ids[0], parallel.tp_rank) for b in microbatches), default=0)
    shared = torch.tensor(largest, device=parallel.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=parallel.model_group)
    step = max(1, kept_bytes // max(1, int(shared)))
    for start in range(0, len(microbatches), step):
        yield microbatches[start : start + step]
