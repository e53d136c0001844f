"""The sources of w (`gradnorm.source`): the exact norm, or a cheaper estimate.

    exact    ||s||^2
    logit    sum_t rho_t^2 ||d log pi(o_t) / d logits||^2: the energy of the score at the logits, known after forward
    length   response tokens

The policy gradient is unbiased for every source; a worse estimate of w only increases its variance. Every
`gradnorm.check_every` steps the run logs how well the estimate agrees with the exact norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from oblr_megatron.engine.protocol import call_seed
from oblr_megatron.gradient.loss_fn import sample_energies, score_loss
from oblr_megatron.gradient.ratios import RatioFn
from oblr_megatron.model.step import run_schedule
from oblr_megatron.runtime.collectives import all_reduce

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.model.policy import Policy
    from oblr_megatron.norms.sample_gradients import SampleGradients
    from oblr_megatron.types import MicroBatch, Sample


CHECKED = 16  # responses of a step; their exact norms are compared with estimates. Rounded up to whole prompts


def measured_prompts(config: Config, step: int) -> Tensor:
    """The prompts of a step that norms are measured of: [Q] bool; with gradnorm.sample_fraction some at random."""
    fraction, num_prompts = config.gradnorm.sample_fraction, config.num_prompts
    if fraction == 1:
        return torch.ones(num_prompts, dtype=torch.bool)
    generator = torch.Generator().manual_seed(call_seed(config.seed, step))
    chosen = torch.randperm(num_prompts, generator=generator)[: max(1, round(fraction * num_prompts))]
    return torch.zeros(num_prompts, dtype=torch.bool).index_fill_(0, chosen, True)


def estimates_are_due(config: Config, step: int) -> bool:
    """Whether the estimates of a step, counted from 1, are compared with exact norms."""
    return config.compares_norms and (step - 1) % config.gradnorm.check_every == 0


def some_prompts(config: Config, estimated: Tensor) -> Tensor:
    """A few of the prompts [k] with an estimate, for a comparison."""
    candidates = estimated.nonzero().flatten()
    few = -(-CHECKED * len(estimated) // (config.group_size * config.num_prompts))
    chosen = torch.zeros_like(estimated)
    chosen[candidates[:: max(1, len(candidates) // few)][:few]] = True
    return chosen


def sq_norms_of(
    gradients: SampleGradients | None,
    policy: Policy,
    samples: Sequence[Sample],
    microbatches: Sequence[MicroBatch],
    *,
    source: str,
    temperature: float,
    ratios: RatioFn,
) -> Tensor:
    """w [n] fp64 of the microbatches' samples by the given source, the same on every rank of the replica."""
    if source == "length":
        lengths = [float(samples[n].length) for batch in microbatches for n in batch.sample_index.tolist()]
        return torch.tensor(lengths, dtype=torch.float64, device=policy.parallel.device)
    if source == "logit":
        return _energies(policy, microbatches, temperature, ratios)
    assert gradients is not None, "the run measures no norms"
    return gradients.sq_norms(microbatches, score_loss(policy, temperature, ratios))


def _energies(policy: Policy, microbatches: Sequence[MicroBatch], temperature: float, ratios: RatioFn) -> Tensor:
    """The squared norm of the weighted score at the logits, summed over each sample's tokens: [n]."""
    parallel = policy.parallel

    def loss_of(hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = policy.head(hidden, batch, temperature=temperature, energy=True, others=ratios.others(batch))
        weights = ratios(tokens, batch)
        return hidden.new_zeros(()), {"energy": sample_energies(tokens, weights, batch, temperature)}

    records = run_schedule(policy, microbatches, loss_of, forward_only=True)
    energies = torch.zeros(sum(b.num_samples for b in microbatches), dtype=torch.float64, device=parallel.device)
    if records:
        energies += torch.cat([record["energy"] for record in records])
        energies /= parallel.tp_size  # every tensor-parallel rank of the last stage has the whole value
    all_reduce(energies, parallel.replica_group)
    return energies
