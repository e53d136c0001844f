"""The sources of w (`gradnorm.source`): the exact norm, or a cheaper estimate.

    exact    ||s||^2
    logit    sum_t rho_t^2 ||d log pi(o_t) / d logits||^2: the energy of the score at the logits, forward only
    length   response tokens

The policy gradient is unbiased for every source; a worse estimate of w only increases its variance. Every
`gradnorm.check_every` steps the run logs how well the estimate agrees with the exact norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.data.packing import microbatches, one_per_microbatch
from oblr_megatron.gradient.loss_fn import score_loss
from oblr_megatron.gradient.ratios import RatioFn
from oblr_megatron.norms.two_pass import rules_need_single_samples, sq_grad_norms
from oblr_megatron.runtime.collectives import all_reduce

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.model.policy import Policy
    from oblr_megatron.norms.rules import Rule
    from oblr_megatron.types import MicroBatch, Sample


def sq_norms_of(
    policy: Policy,
    samples: Sequence[Sample],
    batches: Sequence[MicroBatch],
    config: Config,
    ratios: RatioFn,
    source: str,
) -> Tensor:
    """w [n] fp64 of the microbatches' samples by the given source, the same on every rank of the replica."""
    if source == "length":
        lengths = [float(samples[n].length) for batch in batches for n in batch.sample_index.tolist()]
        return torch.tensor(lengths, dtype=torch.float64, device=policy.parallel.device)
    temperature = config.rollout.temperature
    if source == "logit":
        return _energies(policy, batches, temperature, ratios)
    return sample_sq_grad_norms(policy, batches, temperature=temperature, ratios=ratios)


def sample_sq_grad_norms(
    policy: Policy,
    batches: Sequence[MicroBatch],
    *,
    temperature: float = 1.0,
    ratios: RatioFn | None = None,
    **options: Any,
) -> Tensor:
    """w_i = ||grad_theta sum_t rho_t log pi(o_t)||^2 of every sample: `sq_grad_norms` of the score."""
    return sq_grad_norms(policy, batches, score_loss(policy, temperature, ratios), **options)


def norm_batches(
    policy: Policy, config: Config, rules: Sequence[Rule], samples: Sequence[Sample], indices: Sequence[int]
) -> list[MicroBatch]:
    """Microbatches of a pass that measures norms: as in plain training, or of one sample if the rules need that."""
    device = policy.parallel.device
    if rules_need_single_samples(rules):
        return one_per_microbatch(samples, indices, device=device)
    return microbatches(samples, indices, config.parallel, policy.padding, device=device)


def _energies(policy: Policy, batches: Sequence[MicroBatch], temperature: float, ratios: RatioFn) -> Tensor:
    """The energy [n] of each sample's score at the logits."""
    from oblr_megatron.model.logprobs import vocab_parallel_energy, vocab_parallel_logprobs
    from oblr_megatron.model.step import run_schedule

    parallel = policy.parallel
    vocab: dict[str, Any] = {"vocab_size": policy.vocab_size, "parallel": parallel, "temperature": temperature}

    def loss_of(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        rho, _ = ratios(vocab_parallel_logprobs(logits, batch.labels, **vocab, invariant=policy.tap.invariant), batch)
        of_tokens = vocab_parallel_energy(logits, batch.labels, **vocab) * rho.square()
        return logits.new_zeros(()), {"energy": batch.per_sample(of_tokens.to(torch.float64))}

    records = run_schedule(policy, batches, loss_of, forward_only=True)
    energies = torch.zeros(sum(b.num_samples for b in batches), dtype=torch.float64, device=parallel.device)
    if records:
        energies += torch.cat([record["energy"] for record in records])
        energies /= parallel.tp_size  # every tensor-parallel rank of the last stage has the whole value
    all_reduce(energies, parallel.replica_group)
    return energies
