"""A pass over microbatches by megatron-core's own schedules, and the reductions that make its gradients whole.

    policy.zero_grad()
    metrics = run_schedule(policy, microbatches, loss_fn)     # main_grad += this rank's part, nothing divided
    reduce_model_parallel_grads(policy)                       # tensor, pipeline, context and expert parallel
    reduce_data_parallel_grads(policy)                        # sum over replicas

After both reductions `main_grad` is the gradient of the sum of all ranks' losses, identically on every replica; with
the distributed optimizer each replica has its share of that sum (`shards.held`). Where backward has begun the sum over
replicas itself (`parallel.overlap_grad_reduce`), `finish_overlapped_grads` stands for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
    _allreduce_word_embedding_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.autograd import Variable

from oblr_megatron.data.packing import empty_batch
from oblr_megatron.model import moe
from oblr_megatron.model.sequence import local_part, packed_params
from oblr_megatron.model.taps import AccumulateSink, Sink, Tap
from oblr_megatron.types import MicroBatch

if TYPE_CHECKING:
    from oblr_megatron.model.qwen3 import Policy
    from oblr_megatron.model.router import RouterLosses

LossFn = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""(logits [b, t, Vp / tp], microbatch) -> (scalar loss, metrics), called on the last pipeline stage.

The microbatch is this rank's part of the one given (`sequence.local_part`): padded where sequence or context
parallelism asks for it, and under context parallelism cut, so that loss and metrics are summands over the ranks of
`cp_group`. The loss must depend on the logits, if only with weight 0: the earlier stages wait for its gradient.
"""


def run_schedule(
    policy: Policy,
    microbatches: Sequence[MicroBatch],
    loss_fn: LossFn,
    *,
    forward_only: bool = False,
    sink: Sink | None = None,
    routers: RouterLosses | None = None,
) -> list[dict[str, Tensor]]:
    """Forward, and backward unless `forward_only`, over the microbatches: no pipelining, 1F1B, or interleaved 1F1B.

    Gradients go to the sink (by default they are added to `main_grad`): not divided by anything, not reduced over any
    rank.

    Args:
        policy: every rank of a replica passes the same microbatches; replicas may differ, in number too.
        microbatches: may differ in length and rows. On this rank's device.
        loss_fn: the loss of one microbatch, see `LossFn`.
        forward_only: no graph is kept, `main_grad` stays as it is.
        sink: what is done with the weight gradients of each microbatch, on every stage.
        routers: a mixture's losses, added on every stage over the tokens of the microbatches' masks.

    Returns:
        The metrics of each microbatch in order on the last stage; an empty list on the others.
    """
    if not microbatches:
        return []
    items = _items(policy, microbatches)
    losses = nullcontext() if routers is None else routers.attached()
    with torch.set_grad_enabled(not forward_only), policy.tap.into(sink), losses:
        records: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=_forward_step(policy, loss_fn, announces=not forward_only, masked=routers is not None),
            data_iterator=[iter(items) for _ in policy.chunks],
            model=policy.chunks,
            num_microbatches=len(items),
            seq_length=0,  # unused: the stages exchange shapes
            micro_batch_size=0,  # unused
            forward_only=forward_only,
        )
    return records[: len(microbatches)]


def reduce_model_parallel_grads(policy: Policy) -> None:
    """Make `main_grad` whole within a replica.

    Sums everything but experts over context parallelism, over tensor parallelism the weights whose gradient is a
    partial there (q and k norms always; the other norms and routers under sequence parallelism), a tied embedding over
    the first and last stage, and experts over the ranks that have seen parts of the same sequences. Call once, after
    the last microbatch.
    """
    for chunk in policy.chunks:
        for buffer in chunk.buffers:
            dist.all_reduce(buffer.grad_data, group=policy.parallel.cp_group)
    _reduce_partial_grads(policy)
    moe.sum_expert_grads(policy)


def reduce_data_parallel_grads(policy: Policy) -> None:
    """Sum `main_grad` over the replicas (megatron-core's own gradient sync). Call once after the last microbatch."""
    moe.share_expert_grads(policy)
    cp_size = policy.parallel.cp_size
    for chunk in policy.chunks:
        if cp_size > 1:  # whole on each of these ranks, which megatron-core takes for replicas
            for buffer in chunk.buffers:
                buffer.grad_data.div_(cp_size)
        chunk.finish_grad_sync()


def finish_overlapped_grads(policy: Policy) -> None:
    """Wait for the sum over replicas and context-parallel ranks that the last microbatch began; then the rest.

    In the other order than without overlap, which is the same sum: what tensor-parallel ranks or the two stages of a
    tied embedding add up stands at the same place in the same rank's share.
    """
    for chunk in policy.chunks:
        chunk.finish_grad_sync()
    _reduce_partial_grads(policy)


def _reduce_partial_grads(policy: Policy) -> None:
    """Weights whose gradient is a partial on each tensor-parallel rank, and a tied embedding on two stages."""
    _allreduce_non_tensor_model_parallel_grads(policy.chunks, policy.transformer_config)
    _allreduce_word_embedding_grads(policy.chunks, policy.transformer_config)


Item = tuple[int | None, MicroBatch]
"""Position among the microbatches (None: a filler that counts for nothing), and this rank's part of one."""


def _items(policy: Policy, microbatches: Sequence[MicroBatch]) -> list[Item]:
    """What goes through the pipeline: the interleaved schedule takes a multiple of the number of stages.

    megatron-core would also take other numbers, in larger groups, and keep the activations of as many more of them. A
    filler is one token.
    """
    parallel, padding = policy.parallel, policy.padding
    parts = (local_part(parallel, batch, padding) for batch in microbatches)
    items: list[Item] = list(enumerate(parts))
    if len(policy.chunks) > 1:
        filler = local_part(parallel, empty_batch(device=parallel.device), padding)
        items += [(None, filler)] * (-len(items) % parallel.pp_size)
    return items


def _forward_step(
    policy: Policy, loss_fn: LossFn, *, announces: bool, masked: bool
) -> Callable[[Iterator[Item], DistributedDataParallel], tuple[Tensor, Callable[..., Any]]]:
    def forward_step(data: Iterator[Item], model: DistributedDataParallel) -> tuple[Tensor, Callable[..., Any]]:
        position, batch = next(data)
        output = model(
            input_ids=batch.input_ids,
            position_ids=None,  # the rotary embedding counts by itself
            attention_mask=None,
            packed_seq_params=packed_params(policy.parallel, batch),
            **({"padding_mask": batch.mask} if masked else {}),  # of a mixture's routers, and read by them alone
        )
        if announces:
            chunk = next(index for index, candidate in enumerate(policy.chunks) if candidate is model)
            output.register_hook(partial(_announce, policy.tap, position, chunk, batch))
        return output, partial(_loss, loss_fn if position is not None else _no_loss, batch)

    return forward_step


def _announce(tap: Tap, position: int | None, chunk: int, batch: MicroBatch, grad: Tensor) -> None:
    """A backward has reached the chunk's output, so it is this microbatch's; tell when it has gone all the way.

    The engine runs queued callbacks when the current backward ends, after the last weight gradient was accumulated. The
    zeros of a filler are kept from the sink.
    """
    sink = tap.sink
    if position is None:
        tap.sink = AccumulateSink()
        Variable._execution_engine.queue_callback(partial(setattr, tap, "sink", sink))
    else:
        sink.begin(position, chunk, batch)
        Variable._execution_engine.queue_callback(partial(sink.end, position, chunk))


def _loss(loss_fn: LossFn, batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Three values and `calculate_per_token_loss`: the one form in which megatron-core divides the loss by nothing."""
    loss, metrics = loss_fn(logits, batch)
    assert loss.requires_grad or not torch.is_grad_enabled(), "loss_fn must return a loss that depends on the logits"
    return loss, torch.ones((), dtype=torch.int, device=loss.device), metrics


def _no_loss(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Depends on the logits with gradient zero, whatever they are."""
    return logits[..., :0].sum(), {}
