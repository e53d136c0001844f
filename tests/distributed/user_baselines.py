"""A user's baselines for runs in these tests: copies of `optimal` and `pooled`."""

from __future__ import annotations

import torch
from torch import Tensor

from oblr_megatron import baseline
from oblr_megatron.algo.formulas import History
from oblr_megatron.algo.weighting import first_guess, mean_of_others


@baseline(over="others", needs_norms=True)
def optimal(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    return mean_of_others(rewards, norms_sq)


@baseline(over="nothing", pool="norms")
def pooled(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    known = rewards.new_full(rewards.shape[:1], torch.nan) if history.expected is None else history.expected
    return torch.where(known.isnan(), first_guess(rewards), known)[:, None].expand_as(rewards)


@baseline(over="others")
def mean(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """Not what it says: o_i is included."""
    return rewards.mean(1, keepdim=True).expand_as(rewards)
