"""The weights rho_t of the score s = sum_t rho_t grad log pi(o_t): the correction of the mismatch with the engine.

rho_t = min(pi / mu, C) inside the band, 0 outside      (algo/importance.py, algo/rejection.py)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from oblr_megatron.algo.importance import truncated_ratios
from oblr_megatron.algo.rejection import kept_tokens
from oblr_megatron.types import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.model.qwen3 import Policy

RATIO_SUMS = ("abs_diff", "cut", "mismatch", "rejected", "rejected_samples", "samples")
"""What a RatioFn sums over this rank's response tokens; `PassMetrics` explains each."""

RatioFn = Callable[["Tensor", MicroBatch], tuple["Tensor", Callable[[], "Tensor"]]]
"""(detached log-probs [b, t], their microbatch) -> (weights rho [b, t], a function that returns `RATIO_SUMS` in fp64).

The sums wait for the GPU, so passes that record nothing do not ask for them."""


def importance_ratios(config: Config, policy: Policy) -> RatioFn:
    """The weights of a run's options in [rollout]."""
    rollout, parallel = config.rollout, policy.parallel
    low, high = rollout.rejection_band

    def over_context(sums: Tensor) -> Tensor:
        """All-reduce sums over a sample's tokens, of which this context-parallel rank has a part."""
        dist.all_reduce(sums, group=parallel.cp_group)
        return sums

    def ratios(logprobs: Tensor, batch: MicroBatch) -> tuple[Tensor, Callable[[], Tensor]]:
        found, drawn, mask = logprobs.detach(), batch.rollout_logprobs, batch.mask
        rho, cut = truncated_ratios(
            found,
            drawn,
            mask,
            level=rollout.importance_sampling,
            cap=rollout.importance_cap,
            cu_seqlens=batch.cu_seqlens,
            reduce=over_context,
        )
        keep, lost, samples = kept_tokens(
            found,
            drawn,
            mask,
            level=rollout.rejection,
            low=low,
            high=high,
            cu_seqlens=batch.cu_seqlens,
            reduce=over_context,
            ranks=parallel.cp_size,
        )

        def sums() -> Tensor:
            difference, rejected = (found - drawn)[mask], (mask & ~keep).sum()
            values = (difference.abs().sum(), cut, -difference.sum(), rejected, lost, samples)
            return torch.stack([value.to(torch.float64) for value in values])

        return rho if rollout.rejection == "none" else rho.masked_fill(~keep, 0.0), sums

    return ratios
