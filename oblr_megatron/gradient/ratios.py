"""The weights rho_t of the score s = sum_t rho_t grad log pi(o_t).

    rho_t = correction * m_t
    correction = min(pi_old / mu, C) inside the band, 0 outside      (algo/importance.py, algo/rejection.py)
    m_t = the clipped ratio of pi to pi_old                          (algo/clipping.py)

With `algo.center` the sampler's expectation of rho_t grad log pi is subtracted (algo/centering.py).

mu is the rollout engine's policy, and pi_old the trainer's before the first update on the batch. In the first update
pi_old = pi and m_t = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from oblr_megatron.algo.centering import expected_weights
from oblr_megatron.algo.clipping import ClippedRatios, clipped_ratios
from oblr_megatron.algo.importance import truncated_ratios
from oblr_megatron.algo.rejection import kept_tokens
from oblr_megatron.runtime.collectives import all_reduce
from oblr_megatron.types import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.model.lm_head import TokenScores
    from oblr_megatron.model.policy import Policy

RATIO_SUMS = (
    *("abs_diff", "cut", "mismatch", "rejected", "rejected_samples", "samples"),
    *("clipped", "beyond_dual", "drift"),
    *("outside", "weight"),
)
"""Sums of a RatioFn over this rank's response tokens; `PassMetrics` explains each."""


class ScoreWeights(NamedTuple):
    """The score of a microbatch's tokens is rho_t grad log pi(o_t) - sum_v m(v) grad log pi(v)."""

    rho: Tensor  # [b, t]
    masses: Tensor | None  # [b, t, k] m of the recorded tokens; None without centering
    sums: Callable[[], Tensor]  # returns `RATIO_SUMS` in fp64; passes that record nothing do not call it


@dataclass(frozen=True, slots=True)
class RatioFn:
    """The weights of a microbatch's tokens, from their scores, without gradient."""

    weights: Callable[[TokenScores, MicroBatch], ScoreWeights]
    center: bool  # algo.center

    def __call__(self, scores: TokenScores, batch: MicroBatch) -> ScoreWeights:
        return self.weights(scores, batch)

    def others(self, batch: MicroBatch) -> Tensor | None:
        """Tokens besides the label that need scores, [b, t, k]."""
        return batch.recorded_ids if self.center else None


@dataclass(frozen=True, slots=True)
class Old:
    """Values from before a batch's first update, which its later updates need."""

    logprobs: Tensor  # [n, T] log pi_old of the update's samples, fp64
    advantages: Tensor  # [n], numbers with the sign of A


def importance_ratios(config: Config, policy: Policy, old: Old | None = None) -> RatioFn:
    """The weights that [rollout] and [algo] ask for; without `old` those of a batch's first update."""
    rollout, parallel = config.rollout, policy.parallel
    high = rollout.rejection_high
    low = 1 / high if rollout.rejection_low is None else rollout.rejection_low

    def over_context(sums: Tensor) -> Tensor:
        """All-reduce sums over a sample's tokens, of which this context-parallel rank has a part."""
        all_reduce(sums, parallel.cp_group)
        return sums

    def ratios(scores: TokenScores, batch: MicroBatch) -> ScoreWeights:
        current, drawn, mask = scores.logprobs.detach(), batch.rollout_logprobs, batch.mask
        before = current if old is None else batch.of_tokens(old.logprobs).to(current.dtype)
        rho, cut = truncated_ratios(
            before,
            drawn,
            mask,
            level=rollout.importance_sampling,
            cap=rollout.importance_cap,
            cu_seqlens=batch.cu_seqlens,
            reduce=over_context,
        )
        keep, lost, samples = kept_tokens(
            before,
            drawn,
            mask,
            level=rollout.rejection,
            low=low,
            high=high,
            cu_seqlens=batch.cu_seqlens,
            reduce=over_context,
            ranks=parallel.cp_size,
        )
        rho = rho if rollout.rejection == "none" else rho.masked_fill(~keep, 0.0)
        drift = None if old is None else later(current, before, batch, old)
        masses, outside = None, torch.zeros_like(mask)
        if scores.others is not None:
            assert batch.recorded_logprobs is not None, "recorded tokens have log-probs"
            outside = mask & ~batch.label_is_recorded.any(-1)
            rho = rho.masked_fill(outside, 0.0)
            masses = expected_weights(
                scores.others.detach(),
                batch.recorded_logprobs,
                corrects=rollout.importance_sampling != "none",
                cap=rollout.importance_cap,
                band=None if rollout.rejection == "none" else (low, high),
            ).masked_fill(~mask[..., None], 0.0)

        def sums() -> Tensor:
            difference, rejected = (before - drawn).masked_fill(~mask, 0.0), (mask & ~keep).sum()
            values = [difference.abs().sum(), cut, -difference.sum(), rejected, lost, samples]
            if drift is None:
                values += [cut.new_zeros(())] * 3
            else:
                values += [
                    drift.clipped.sum(),
                    drift.beyond_dual.sum(),
                    (before - current).masked_fill(~mask, 0.0).sum(),
                ]
            return torch.stack([value.to(torch.float64) for value in (*values, outside.sum(), rho.sum())])

        return ScoreWeights(rho if drift is None else rho * drift.weights, masses, sums)

    def later(current: Tensor, before: Tensor, batch: MicroBatch, old: Old) -> ClippedRatios:
        signs = batch.per_token(old.advantages[batch.sample_index])
        return clipped_ratios(
            current, before, batch.mask, signs, config.algo, cu_seqlens=batch.cu_seqlens, reduce=over_context
        )

    return RatioFn(ratios, config.algo.center)
