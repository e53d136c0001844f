"""What w is (`gradnorm.source`): the exact norm, or one of the estimates that cost less.

    exact    ||s||^2
    sketch   of linear layers the norm of a random projection, unbiased; everything else exactly
    logit    sum_t rho_t^2 ||d log pi(o_t) / d logits||^2: the energy of the score at the logits, forward only
    length   response tokens

Whatever w is, the policy gradient stays unbiased: an estimate costs variance, not truth. How much of
the exact norms it sees is logged every `gradnorm.check_every` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from oblr_megatron.gradnorm.rules import Kind, Rule, classify
from oblr_megatron.gradnorm.score import RatioFn
from oblr_megatron.gradnorm.sketch import Sketch
from oblr_megatron.gradnorm.two_pass import sample_sq_grad_norms

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.gradnorm.reduce import Reducer
    from oblr_megatron.gradnorm.segments import Segments
    from oblr_megatron.model.qwen3 import Policy
    from oblr_megatron.model.token_values import ValuesFn
    from oblr_megatron.types import MicroBatch, Sample


class Sketches:
    """A projection for every linear layer that is large enough for it to pay.

    Shards of one weight have projections of their own; the ranks that share sequences have the same.
    """

    def __init__(self, policy: Policy, size: int, seed: int) -> None:
        parallel = policy.parallel
        where = f"{parallel.pp_rank}/{parallel.tp_rank}"
        self._sketches = {
            id(rule.param): Sketch(
                (rule.param.shape[0], rule.param.shape[1]),
                size,
                seed,
                f"{where}/{rule.chunk}/{rule.name}",
                rule.param.dtype if rule.param.dtype == torch.float64 else torch.float32,
                parallel.device,
            )
            for rule in classify(policy)
            if _sketched(rule, size)
        }

    def covers(self, rule: Rule) -> bool:
        """Whether this parameter's norms are estimated."""
        return id(rule.param) in self._sketches

    def sq_norms(self, rule: Rule, x: Tensor, dy: Tensor, segments: Segments, reducer: Reducer) -> Tensor:
        """[n] fp64 estimates of a linear layer's squared norms, as far as this rank counts them."""
        small = self._sketches[id(rule.param)].project(x, dy, segments)  # [n, m, m]
        reducer.over_context(small)
        norms = small.to(torch.float64).square().sum(dim=(1, 2))
        return norms if reducer.parallel.cp_rank == 0 else torch.zeros_like(norms)


def sketches_of(policy: Policy, config: Config) -> Sketches | None:
    """The run's projections, drawn once; None unless `gradnorm.source` asks for them."""
    if config.gradnorm.source != "sketch":
        return None
    return Sketches(policy, config.gradnorm.sketch_size, config.seed)


def sq_norms_of(
    policy: Policy,
    samples: Sequence[Sample],
    batches: Sequence[MicroBatch],
    config: Config,
    ratios: RatioFn,
    source: str,
    sketches: Sketches | None,
) -> Tensor:
    """w [n] fp64 of the microbatches' samples by the source named, the same on every rank of the replica."""
    if source == "length":
        lengths = [float(len(samples[n].response_ids)) for batch in batches for n in batch.sample_index.tolist()]
        return torch.tensor(lengths, dtype=torch.float64, device=policy.parallel.device)
    temperature = config.rollout.temperature
    if source == "logit":
        return _energies(policy, batches, temperature, ratios)
    return sample_sq_grad_norms(
        policy,
        batches,
        temperature=temperature,
        ratios=ratios,
        sketches=sketches if source == "sketch" else None,
    )


def token_energies(policy: Policy, temperature: float, ratios: RatioFn) -> ValuesFn:
    """rho^2 times the squared score at the logits of each token; what `token_values` asks for."""
    from oblr_megatron.model.logprobs import vocab_parallel_energy, vocab_parallel_logprobs

    vocab: dict[str, Any] = {"vocab_size": policy.vocab_size, "parallel": policy.parallel, "temperature": temperature}

    def energies(logits: Tensor, batch: MicroBatch) -> Tensor:
        rho, _ = ratios(vocab_parallel_logprobs(logits, batch.labels, **vocab), batch)
        return vocab_parallel_energy(logits, batch.labels, **vocab) * rho.square()

    return energies


def _energies(policy: Policy, batches: Sequence[MicroBatch], temperature: float, ratios: RatioFn) -> Tensor:
    """The energy of each sample's score at the logits."""
    from oblr_megatron.model.step import run_schedule

    parallel, of_tokens = policy.parallel, token_energies(policy, temperature, ratios)

    def loss_of(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return logits.new_zeros(()), {"energy": batch.per_sample(of_tokens(logits, batch).to(torch.float64))}

    records = run_schedule(policy, batches, loss_of, forward_only=True)
    energies = torch.zeros(sum(b.num_samples for b in batches), dtype=torch.float64, device=parallel.device)
    if records:
        energies += torch.cat([record["energy"] for record in records])
        energies /= parallel.tp_size  # every rank of the last stage has the whole
    dist.all_reduce(energies, group=parallel.replica_group)
    return energies


def _sketched(rule: Rule, size: int) -> bool:
    matrix = rule.tapped and rule.kind is Kind.SHARD and not rule.expert and rule.param.dim() == 2
    return matrix and not rule.name.startswith("embedding") and min(rule.param.shape) > 2 * size
