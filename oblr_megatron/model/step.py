"""A pass over microbatches by megatron-core's own schedules, and the reductions that make its gradients whole.

    policy.zero_grad()
    metrics = run_schedule(policy, microbatches, loss_fn)     # main_grad += this rank's part, nothing divided
    reduce_model_parallel_grads(policy)                       # tensor and pipeline parallel
    reduce_data_parallel_grads(policy)                        # sum over replicas

After both reductions `main_grad` is the gradient of the sum of all ranks' losses, identically on every replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
    _allreduce_word_embedding_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.autograd import Variable
from torch.nn import functional

from oblr_megatron.model.taps import Sink
from oblr_megatron.types import MicroBatch

if TYPE_CHECKING:
    from oblr_megatron.model.qwen3 import Policy

LossFn = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""(logits [b, t, Vp / tp], microbatch) -> (scalar loss, metrics), called on the last pipeline stage.

Under sequence parallelism `t` of logits and microbatch is padded to a multiple of tp_size. The loss must depend on the
logits, if only with weight 0: the earlier stages wait for its gradient.
"""


def run_schedule(
    policy: Policy,
    microbatches: Sequence[MicroBatch],
    loss_fn: LossFn,
    *,
    forward_only: bool = False,
    sink: Sink | None = None,
) -> list[dict[str, Tensor]]:
    """Forward, and backward unless `forward_only`, over the microbatches (no pipelining, or 1F1B).

    Gradients go to the sink (by default they are added to `main_grad`): not divided by anything, not reduced over any
    rank.

    Args:
        policy: every rank of a replica passes the same microbatches; replicas may differ, in number too.
        microbatches: may differ in length and rows. On this rank's device.
        loss_fn: the loss of one microbatch, see `LossFn`.
        forward_only: no graph is kept, `main_grad` stays as it is.
        sink: what is done with the weight gradients of each microbatch, on every stage.

    Returns:
        The metrics of each microbatch in order on the last stage; an empty list on the others.
    """
    if not microbatches:
        return []
    chunk = policy.chunks[0]
    with torch.set_grad_enabled(not forward_only), policy.tap.into(sink):
        return get_forward_backward_func()(
            forward_step_func=_forward_step(policy, loss_fn, announces=not forward_only),
            data_iterator=iter(list(enumerate(_on_multiple(policy, batch) for batch in microbatches))),
            model=[chunk],
            num_microbatches=len(microbatches),
            seq_length=0,  # unused: the stages exchange shapes
            micro_batch_size=0,  # unused
            forward_only=forward_only,
        )


def reduce_model_parallel_grads(policy: Policy) -> None:
    """Make `main_grad` whole within a replica.

    Sums over tensor parallelism the weights whose gradient is a partial there (q and k norms always; the other norms
    under sequence parallelism), and a tied embedding over the first and last stage. Call once, after the last
    microbatch.
    """
    _allreduce_non_tensor_model_parallel_grads(policy.chunks, policy.transformer_config)
    _allreduce_word_embedding_grads(policy.chunks, policy.transformer_config)


def reduce_data_parallel_grads(policy: Policy) -> None:
    """Sum `main_grad` over the replicas (megatron-core's own gradient sync). Call once after the last microbatch."""
    for chunk in policy.chunks:
        chunk.finish_grad_sync()


def _forward_step(
    policy: Policy, loss_fn: LossFn, *, announces: bool
) -> Callable[[Iterator[tuple[int, MicroBatch]], DistributedDataParallel], tuple[Tensor, Callable[..., Any]]]:
    def forward_step(
        data: Iterator[tuple[int, MicroBatch]], model: DistributedDataParallel
    ) -> tuple[Tensor, Callable[..., Any]]:
        position, batch = next(data)
        rows, length = batch.input_ids.shape
        positions = torch.arange(length, device=batch.input_ids.device).expand(rows, length)
        output = model(input_ids=batch.input_ids, position_ids=positions, attention_mask=None)
        if announces:
            chunk = next(index for index, candidate in enumerate(policy.chunks) if candidate is model)
            output.register_hook(partial(_announce, policy.tap.sink, position, chunk, batch))
        return output, partial(_loss, loss_fn, batch)

    return forward_step


def _announce(sink: Sink, position: int, chunk: int, batch: MicroBatch, grad: Tensor) -> None:
    """A backward has reached the chunk's output, so it is this microbatch's; tell when it has gone all the way.

    The engine runs queued callbacks when the current backward ends, after the last weight gradient was accumulated.
    """
    sink.begin(position, chunk, batch)
    Variable._execution_engine.queue_callback(partial(sink.end, position, chunk))


def _loss(loss_fn: LossFn, batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Three values and `calculate_per_token_loss`: the one form in which megatron-core divides the loss by nothing."""
    loss, metrics = loss_fn(logits, batch)
    assert loss.requires_grad or not torch.is_grad_enabled(), "loss_fn must return a loss that depends on the logits"
    return loss, torch.ones((), dtype=torch.int, device=loss.device), metrics


def _on_multiple(policy: Policy, batch: MicroBatch) -> MicroBatch:
    """Pad the sequence on the right so that sequence parallelism can split it."""
    parallel = policy.parallel
    missing = -batch.input_ids.shape[1] % (parallel.tp_size if parallel.sequence_parallel else 1)
    if not missing:
        return batch
    values = {field.name: getattr(batch, field.name) for field in fields(MicroBatch)}
    for name in ("input_ids", "labels", "mask", "rollout_logprobs"):
        values[name] = functional.pad(values[name], (0, missing))
    return MicroBatch(**values)
