"""Log-probs of every response token of a step from a forward pass, gathered on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oblr_megatron.model.step import run_schedule
from oblr_megatron.runtime.collectives import all_reduce
from oblr_megatron.types import MicroBatch, Sample

if TYPE_CHECKING:
    from oblr_megatron.model.policy import Policy


def response_logprobs(
    policy: Policy, samples: Sequence[Sample], batches: Sequence[MicroBatch], temperature: float
) -> Tensor:
    """log pi [N, T] fp64 of every response token on every rank, T the longest response (at least 1).

    Collective over all ranks. 0 past a response's end, and for samples in no microbatch.

    Args:
        policy: the model; no gradient is taken.
        samples: [N] of the step, the same on every rank.
        batches: this replica's microbatches, possibly none; each sample is on one replica and in one microbatch.
        temperature: of the sampling distribution.
    """
    parallel = policy.parallel

    def placed(hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.token_index is not None, "the microbatch has no token_index"
        logprobs = policy.head(hidden, batch, temperature=temperature).logprobs
        rows, values = batch.per_token(batch.sample_index), logprobs.to(torch.float64)  # 0 outside the mask
        return hidden.new_zeros(()), {"values": values, "rows": rows, "places": batch.token_index}

    longest = max(1, *(sample.length for sample in samples))
    table = torch.zeros(len(samples), longest, dtype=torch.float64, device=parallel.device)
    for record in run_schedule(policy, batches, placed, forward_only=True):
        table.index_put_((record["rows"], record["places"]), record["values"], accumulate=True)
    all_reduce(table, parallel.pp_group)
    all_reduce(table, parallel.dp_cp_group)
    return table
