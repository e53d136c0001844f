"""Mode `two_pass`: a forward and backward of every sample for its norm, then a second pass for the policy gradient.

The cost is at most one more forward and backward over the samples. The first pass squares weight gradients in tiles, or
skips them if the Gram form is cheaper. It needs no extra memory for gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from oblr_megatron.memory.buffer_sizes import KEPT_BYTES
from oblr_megatron.model.step import run_schedule
from oblr_megatron.norms.accumulate import NormAccumulator, buffered_bytes
from oblr_megatron.norms.norm_sink import NormSink
from oblr_megatron.norms.reduce import Reducer
from oblr_megatron.norms.rules import Rule, classify, untapped_aside
from oblr_megatron.runtime.collectives import all_reduce

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.model.sequence import Batch
    from oblr_megatron.model.step import LossFn
    from oblr_megatron.model.tapped import TappedModel
    from oblr_megatron.types import TokenRows


def sq_grad_norms(
    model: TappedModel,
    microbatches: Sequence[TokenRows],
    loss_of: LossFn,
    *,
    kept_bytes: int = KEPT_BYTES,
    rules: Sequence[Rule] | None = None,
    reducer: Reducer | None = None,
) -> Tensor:
    """||grad_theta loss_i||^2 of every sample, over all trainable parameters.

    Collective over the replica, with the same samples on all its ranks. Replicas that share experts must all call it,
    with the same number of microbatches and one sample in each.

    Args:
        model: weights and `main_grad` are unchanged.
        microbatches: of any length, several samples each unless `rules_need_single_samples`.
        loss_of: the sum of the samples' losses.
        kept_bytes: bound on a rank's buffered partial gradients; more samples take several pipeline runs.
        rules: by default those of `classify`.
        reducer: by default one for the model's layout.

    Returns:
        [n] fp64 in the order of the microbatches' samples, the same on every rank of the replica. 0 for an empty
        response; not finite if the gradient is not.

    Raises:
        UserError: no rule covers a trainable parameter.
    """
    rules, reducer = rules or classify(model), reducer or Reducer(model.parallel)
    norms = [torch.zeros(0, dtype=torch.float64, device=model.parallel.device)]
    with untapped_aside(rules):
        for batches in pipeline_runs(model, microbatches, rules, kept_bytes):
            accumulator = NormAccumulator(rules, batches, reducer)
            run_schedule(model, batches, loss_of, sink=NormSink(rules, accumulator))
            norms.append(reducer.finish(accumulator))
    return torch.cat(norms)


def rules_need_single_samples(rules: Sequence[Rule]) -> bool:
    """Whether microbatches must hold one sample: experts and untapped layers cannot tell samples apart."""
    return any(rule.expert or not rule.tapped for rule in rules if rule.param.requires_grad)


def pipeline_runs(
    model: TappedModel, microbatches: Sequence[Batch], rules: Sequence[Rule], kept_bytes: int
) -> Iterator[Sequence[Batch]]:
    """Split the microbatches into pipeline runs that buffer at most `kept_bytes` on any rank of the block."""
    parallel = model.parallel
    largest = max((buffered_bytes(rules, batch, parallel) for batch in microbatches), default=0)
    shared = torch.tensor(largest, device=parallel.device)
    all_reduce(shared, parallel.block_group, dist.ReduceOp.MAX)
    step = max(1, kept_bytes // max(1, int(shared)))
    for start in range(0, len(microbatches), step):
        yield microbatches[start : start + step]
