"""Forward and backward over microbatches by megatron-core's schedules, and the reductions of the gradient.

    policy.zero_grad()
    metrics = run_schedule(policy, microbatches, loss_fn)     # main_grad += this rank's part, nothing divided
    reduce_model_parallel_grads(policy)                       # tensor, pipeline, context and expert parallel
    reduce_data_parallel_grads(policy)                        # sum over replicas

After both reductions `main_grad` is the gradient of the sum of all ranks' losses, the same on every replica. With the
distributed optimizer each replica has its share of that sum (`shards.held`). With `parallel.overlap_grad_reduce`
backward starts the sum over replicas, and `finish_overlapped_grads` replaces both reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from oblr_megatron.model.cpu.attention import SdpaAttention
from oblr_megatron.model.router import RouterBatch, routers_of
from oblr_megatron.model.sequence import for_loss, local_part, on_device, packed_params
from oblr_megatron.model.tapped import unwrapped
from oblr_megatron.model.taps import DropSink, Sink, Tap
from oblr_megatron.types import TokenRows

if TYPE_CHECKING:
    from oblr_megatron.model.router import RouterLosses
    from oblr_megatron.model.tapped import TappedModel

LossFn = Callable[[Tensor, Any], tuple[Tensor, dict[str, Tensor]]]
"""(output [b, t, ..], microbatch) -> (scalar loss, metrics), called on the last pipeline stage.

The output is that of the model: of a `Policy` the input [b, t, h] of its output layer (`lm_head.py`), else logits
[b, t, Vp / tp]. An arbitrary loss, as the norms' library allows, needs all logits of a token.

The microbatch is this rank's part (`sequence.local_part`): padded for sequence or context parallelism, and cut under
context parallelism, so that loss and metrics are partial sums over `cp_group`. The loss must depend on the output, if
only with weight 0, because the earlier stages wait for its gradient.
"""


def run_schedule(
    policy: TappedModel,
    microbatches: Sequence[TokenRows],
    loss_fn: LossFn,
    *,
    forward_only: bool = False,
    sink: Sink | None = None,
    routers: RouterLosses | None = None,
) -> list[dict[str, Tensor]]:
    """Forward, and backward unless `forward_only`, over the microbatches: no pipelining, 1F1B, or interleaved 1F1B.

    Weight gradients go to the sink, neither divided nor reduced over ranks.

    Args:
        policy: the model. Every rank of a replica passes the same microbatches; replicas may differ, also in number.
        microbatches: best in host memory; may differ in length and number of rows.
        loss_fn: the loss of one microbatch, see `LossFn`.
        forward_only: keep no graph and leave `main_grad` unchanged.
        sink: receives the weight gradients of each microbatch, on every stage; by default adds them to `main_grad`.
        routers: a mixture's router losses, added on every stage over the tokens of the masks.

    Returns:
        The metrics of each microbatch in order on the last stage; an empty list on the others.
    """
    if not microbatches:
        return []
    items = _items(policy, microbatches)
    bounds_on = _device_of_bounds(policy, microbatches)
    with torch.set_grad_enabled(not forward_only), policy.tap.into(sink), routers_of(policy, routers) as chunk_routers:

        def forward_step(data: Iterator[Item], model: DistributedDataParallel) -> tuple[Tensor, Callable[..., Any]]:
            position, batch = next(data)
            chunk = next(index for index, candidate in enumerate(policy.chunks) if candidate is model)
            routed = RouterBatch(chunk_routers[chunk], batch)
            routed.enter()
            output = model(
                input_ids=batch.input_ids,
                position_ids=None,  # the rotary embedding computes positions itself
                attention_mask=None,
                packed_seq_params=packed_params(policy.parallel, batch, bounds_on),
            )
            begin = None if forward_only else partial(_announce, policy.tap, position, chunk, batch, routed)
            if begin and not unwrapped(model).post_process and output.requires_grad:  # else the whole stage is frozen
                output.register_hook(begin)
            return output, partial(_loss, loss_fn if position is not None else policy.no_loss, batch, begin)

        records: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(items) for _ in policy.chunks],
            model=policy.chunks,
            num_microbatches=len(items),
            seq_length=0,  # unused: the stages exchange shapes
            micro_batch_size=0,  # unused
            forward_only=forward_only,
        )
    return records[: len(microbatches)]


def reduce_model_parallel_grads(policy: TappedModel) -> None:
    """All-reduce `main_grad` within a replica. Call once, after the last microbatch.

    - Context parallelism: everything except experts.
    - Tensor parallelism: q and k norms; under sequence parallelism also the other norms and routers.
    - Pipeline: a tied embedding, over the first and last stage.
    - Experts: over the ranks that have seen parts of the same sequences.

    Example for experts: TP4 and EP2 with whole experts (expert_tensor_parallel_size 1). Ranks 0 and 2 hold the same
    experts, and each has seen half of the sequence.
    """
    for buffer, group in _repeated_buffers(policy):
        dist.all_reduce(buffer.grad_data, group=group)
    _reduce_partial_grads(policy)


def reduce_data_parallel_grads(policy: TappedModel) -> None:
    """Sum `main_grad` over replicas with megatron-core's gradient sync. Call once, after the last microbatch."""
    for buffer, group in _repeated_buffers(policy):  # megatron-core sums over these ranks too, and each has the sum
        buffer.grad_data.div_(group.size())
    for chunk in policy.chunks:
        chunk.finish_grad_sync()


def _repeated_buffers(policy: TappedModel) -> Iterator[tuple[Any, dist.ProcessGroup]]:
    """Gradient buffers of which several ranks of a replica have a part, and these ranks. No group has one rank.

    With NCCL a group of one would get its own communicator, and an all-reduce would read every buffer.
    """
    parallel = policy.parallel
    for chunk in policy.chunks:
        if parallel.cp_size > 1:
            yield from ((buffer, parallel.cp_group) for buffer in chunk.buffers)
        if parallel.expert_sum_group is not None:
            yield from ((buffer, parallel.expert_sum_group) for buffer in chunk.expert_parallel_buffers)


def finish_overlapped_grads(policy: TappedModel) -> None:
    """Wait for the sum over replicas and context-parallel ranks that the last microbatch started; then do the rest.

    The reversed order gives the same sum: tensor-parallel ranks, and the two stages of a tied embedding, add elements
    at the same position of the same rank's share.
    """
    for chunk in policy.chunks:
        chunk.finish_grad_sync()
    _reduce_partial_grads(policy)


def _reduce_partial_grads(policy: TappedModel) -> None:
    """All-reduce partial gradients over tensor-parallel ranks, and a tied embedding over its two stages."""
    _allreduce_non_tensor_model_parallel_grads(policy.chunks, policy.transformer_config)
    _allreduce_word_embedding_grads(policy.chunks, policy.transformer_config)


Item = tuple[int | None, TokenRows]
"""(position among the microbatches, this rank's part of the microbatch); the position of a filler is None."""


def _device_of_bounds(policy: TappedModel, microbatches: Sequence[TokenRows]) -> torch.device:
    """Where the layers read the bounds of packed samples: megatron-core's rotary embedding reads them in Python."""
    packed = any(batch.cu_seqlens is not None for batch in microbatches)
    local = packed and any(isinstance(layer, SdpaAttention) for chunk in policy.modules for layer in chunk.modules())
    return torch.device("cpu") if local else policy.parallel.device


def _items(policy: TappedModel, microbatches: Sequence[TokenRows]) -> list[Item]:
    """The pipeline's input: the microbatches, filled up to a multiple of pp_size for the interleaved schedule.

    megatron-core also accepts other numbers, but then works in larger groups, which keep more activations. A filler is
    one token.
    """
    parallel, padding = policy.parallel, policy.padding

    def part(batch: TokenRows) -> TokenRows:
        return on_device(local_part(parallel, batch, padding), parallel.device)

    items: list[Item] = [(position, part(batch)) for position, batch in enumerate(microbatches)]
    if len(policy.chunks) > 1:
        items += [(None, part(empty_batch()))] * (-len(items) % parallel.pp_size)
    return items


def _announce(tap: Tap, position: int | None, chunk: int, batch: TokenRows, routed: RouterBatch, grad: Tensor) -> None:
    """Call `sink.begin` when a microbatch's backward reaches this chunk, and `sink.end` when it is complete.

    The autograd engine runs queued callbacks when the current backward ends, after the last weight gradient was
    accumulated. A filler's zero gradients bypass the sink. Routers of layers that run again need their microbatch.
    """
    sink = tap.sink
    routed.enter()
    if position is None:
        tap.sink = DropSink()
        Variable._execution_engine.queue_callback(partial(setattr, tap, "sink", sink))
    else:
        sink.begin(position, chunk, batch)
        Variable._execution_engine.queue_callback(partial(sink.end, position, chunk))


def _loss(
    loss_fn: LossFn, batch: TokenRows, begin: Callable[[Tensor], None] | None, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return three values: with `calculate_per_token_loss` this is the only form that megatron-core does not divide.

    The backward of the last chunk begins at the loss: the output layer may be a part of it.
    """
    loss, metrics = loss_fn(output, for_loss(batch, output.device))
    assert loss.requires_grad or not torch.is_grad_enabled(), "loss_fn must return a loss that depends on the output"
    if begin:
        loss.register_hook(begin)
    return loss, torch.ones((), dtype=torch.int, device=loss.device), metrics
