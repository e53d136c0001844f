"""One value for every response token of a step from a forward pass, gathered on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oblr_megatron.model.logprobs import vocab_parallel_logprobs
from oblr_megatron.model.step import run_schedule
from oblr_megatron.runtime.collectives import all_reduce
from oblr_megatron.types import MicroBatch, Sample

if TYPE_CHECKING:
    from oblr_megatron.model.policy import Policy

ValuesFn = Callable[[Tensor, MicroBatch], Tensor]
"""(logits [b, t, Vp / tp], this rank's part of a microbatch) -> one value for each position [b, t]."""


def token_values(
    policy: Policy, samples: Sequence[Sample], batches: Sequence[MicroBatch], values_of: ValuesFn
) -> Tensor:
    """[N, T] fp64 on every rank, T the longest response (at least 1). Collective over all ranks.

    The value is 0 past a response's end, and for samples in no microbatch.

    Args:
        policy: the model; no gradient is taken.
        samples: [N] of the step, the same on every rank.
        batches: this replica's microbatches, possibly none; each sample is on one replica and in one microbatch.
        values_of: the value of each position; values outside the mask are not read.
    """
    parallel = policy.parallel

    def placed(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.token_index is not None, "the microbatch has no token_index"
        columns = (values_of(logits, batch), batch.per_token(batch.sample_index), batch.token_index)
        values, rows, places = (column[batch.mask] for column in columns)
        return logits.new_zeros(()), {"values": values.to(torch.float64), "rows": rows, "places": places}

    longest = max(1, *(sample.length for sample in samples))
    table = torch.zeros(len(samples), longest, dtype=torch.float64, device=parallel.device)
    for record in run_schedule(policy, batches, placed, forward_only=True):
        table[record["rows"], record["places"]] = record["values"]
    all_reduce(table, parallel.pp_group)
    all_reduce(table, parallel.dp_cp_group)
    return table


def response_logprobs(
    policy: Policy, samples: Sequence[Sample], batches: Sequence[MicroBatch], temperature: float
) -> Tensor:
    """log pi [N, T] fp64 of every response token, at the sampling temperature; other arguments as in `token_values`."""

    vocab: dict[str, Any] = {"vocab_size": policy.vocab_size, "parallel": policy.parallel, "temperature": temperature}

    def values_of(logits: Tensor, batch: MicroBatch) -> Tensor:
        return vocab_parallel_logprobs(logits, batch.labels, **vocab, operations=policy.tap.operations)

    return token_values(policy, samples, batches, values_of)
