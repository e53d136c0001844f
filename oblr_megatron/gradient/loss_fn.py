"""The loss of a pass over samples, its KL penalty, and the metrics that it records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from oblr_megatron.algo.centering import centred_energy
from oblr_megatron.algo.kl import KLForm, k3, kl_slope
from oblr_megatron.algo.loss import policy_gradient_loss
from oblr_megatron.gradient.ratios import RATIO_SUMS, RatioFn, ScoreWeights
from oblr_megatron.runtime.collectives import all_reduce
from oblr_megatron.types import ClipMetrics, GradientStats, MicroBatch, RejectionMetrics

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.model.lm_head import TokenScores
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.model.policy import Policy
    from oblr_megatron.model.step import LossFn
    from oblr_megatron.types import RouterMetrics

Weigh = Callable[["Tensor", "Tensor"], "Tensor"]
"""(numbers [n] of a microbatch's samples, their energies [n] of `sample_energies`) -> coefficients c [n]. Called on the
last pipeline stage, before the backward of these samples."""

SUM_NAMES = ("entropy", *RATIO_SUMS, "kl", "tokens")  # what `score_loss` records, sums over response tokens


@dataclass(slots=True)
class PassMetrics:
    """Sums over the response tokens of a pass on this rank; `total` sums over ranks.

    Example: PassMetrics(loss=-0.02, entropy=5931.2, abs_diff=0.006, cut=0.0, kl=0.0, tokens=3120.0)
    """

    loss: float = 0.0  # -sum_n c_n sum_t rho_t log pi_t
    entropy: float = 0.0  # nats
    abs_diff: float = 0.0  # |log pi_trainer - log pi_rollout|
    cut: float = 0.0  # importance ratios at their cap
    mismatch: float = 0.0  # log pi_rollout - log pi_trainer
    rejected: float = 0.0  # tokens with weight 0 (rollout.rejection)
    rejected_samples: float = 0.0  # responses with such a token
    samples: float = 0.0  # responses with a token; counted with rollout.rejection only
    clipped: float = 0.0  # tokens with a ratio beyond its bound, in a batch's later updates
    beyond_dual: float = 0.0  # tokens with a negative advantage and a ratio above algo.clip_dual
    drift: float = 0.0  # log pi_old - log pi, of the policy before the first update and now
    outside: float = 0.0  # drawn tokens that are not among the recorded ones (algo.center)
    weight: float = 0.0  # rho of the first update, before clipping
    kl: float = 0.0  # k3, nats; 0 without a penalty
    tokens: float = 0.0

    def add(self, records: Sequence[dict[str, Tensor]], coefficients: Tensor) -> None:
        """Add the records of a pass (empty except on the last stage) over samples with c [N]."""
        if not records:
            return
        scores, numbers = (torch.cat([record[name] for record in records]).cpu() for name in ("scores", "numbers"))
        own = coefficients[numbers]
        used = own != 0
        self.loss -= float((own[used] * scores[used]).sum())
        sums = torch.stack([record["sums"] for record in records]).sum(0).tolist()
        for name, value in zip(SUM_NAMES, sums, strict=True):
            setattr(self, name, getattr(self, name) + value)

    def total(self, parallel: Parallel) -> PassMetrics:
        """The sums over all ranks: pipeline stages, replicas and context-parallel ranks."""
        names = [field.name for field in fields(self)]
        sums = torch.tensor([getattr(self, name) for name in names], dtype=torch.float64, device=parallel.device)
        all_reduce(sums, parallel.pp_group)  # zero except on the last stage
        all_reduce(sums, parallel.dp_cp_group)
        return PassMetrics(**dict(zip(names, sums.tolist(), strict=True)))

    def stats(
        self,
        parallel: Parallel,
        config: Config,
        *,
        sq_norm: float,
        fold_sq_norm_mean: float,
        num_folds: int,
        routers: RouterMetrics | None,
    ) -> GradientStats:
        """The statistics of a gradient. The means are over all ranks; collective."""
        sums = self.total(parallel)
        tokens, samples = max(sums.tokens, 1), max(sums.samples, 1)
        rejection = RejectionMetrics(sums.rejected / tokens, sums.rejected_samples / samples, sums.mismatch / tokens)
        clipping = ClipMetrics(sums.clipped / tokens, sums.beyond_dual / tokens, sums.drift / tokens)
        return GradientStats(
            loss=sums.loss,
            sq_norm=sq_norm,
            fold_sq_norm_mean=fold_sq_norm_mean,
            num_folds=num_folds,
            entropy=sums.entropy / tokens,
            logprob_abs_diff=sums.abs_diff / tokens,
            truncated_ratio_fraction=sums.cut / tokens,
            num_tokens=int(sums.tokens),
            weight_mean=sums.weight / tokens,
            kl=sums.kl / tokens if config.algo.kl_coefficient else None,
            routers=routers,
            rejection=None if config.rollout.rejection == "none" else rejection,
            clipping=None if config.algo.updates_per_batch == 1 else clipping,
            unrecorded_fraction=sums.outside / tokens if config.algo.center else None,
        )


@dataclass(frozen=True, slots=True)
class Penalty:
    """The KL penalty of a step: sum_i beta_i sum_t k(log pi - log pi_ref)."""

    coefficients: Tensor  # [N] fp64, beta / the aggregation's divisor
    reference: Tensor  # [N, T] fp64, log pi_ref
    form: KLForm

    def loss(self, logprobs: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(a scalar with the penalty's gradient but another value, the sum of k3 over the response tokens)."""
        difference = logprobs.detach() - batch.of_tokens(self.reference).to(logprobs.dtype)
        weights = -batch.per_token(self.coefficients[batch.sample_index])
        divergence = k3(difference).masked_fill(~batch.mask, 0.0).sum()
        return policy_gradient_loss(logprobs, batch.mask, weights, kl_slope(difference, self.form)), divergence


def score_loss(
    policy: Policy,
    temperature: float,
    ratios: RatioFn | None,
    coefficients: Tensor | Weigh | None = None,
    *,
    penalty: Penalty | None = None,
    records: bool = False,
) -> LossFn:
    """The loss -sum_i c_i sum_t rho_t log pi(o_t). With c = 1, a sample's gradient is minus its score.

    Where microbatches have recorded tokens, sum_v m(v) log pi(v) is subtracted from rho_t log pi(o_t).

    Args:
        policy: provides the layout and the vocabulary size.
        temperature: of the sampling distribution.
        ratios: computes the importance ratios rho; 1 if None.
        coefficients: c [N], or a function of the samples' energies; 1 if None.
        penalty: added to the loss.
        records: return `SUM_NAMES` as "sums", c_i sum_t rho_t log pi(o_t) of each sample as "scores" [n] fp64, and
            their numbers [n].
    """

    def loss_of(hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        head = policy.head
        energy = callable(coefficients)
        others = None if ratios is None else ratios.others(batch)
        tokens = head(hidden, batch, temperature=temperature, entropy=records, energy=energy, others=others)
        logprobs = tokens.logprobs  # [b, t]
        detached = logprobs.detach()
        weights = _ones(detached) if ratios is None else ratios(tokens, batch)
        rho, own = weights.rho, torch.ones_like(detached)
        if callable(coefficients):
            energies = sample_energies(tokens, weights, batch, temperature)
            all_reduce(energies, policy.parallel.cp_group)
            own = batch.per_token(coefficients(batch.sample_index, energies))
        elif coefficients is not None:
            own = batch.per_token(coefficients[batch.sample_index])
        loss, kl = policy_gradient_loss(logprobs, batch.mask, own, rho), detached.new_zeros(())
        scores = rho * detached
        if weights.masses is not None and tokens.others is not None:
            possible = tokens.others.masked_fill(weights.masses == 0, 0.0)  # 0 times -inf is NaN
            centre = (weights.masses * possible).sum(-1)
            loss = loss - policy_gradient_loss(centre, batch.mask, own, torch.ones_like(rho))
            scores = scores - centre.detach()
        if penalty is not None:
            added, kl = penalty.loss(logprobs, batch)
            loss = loss + added
        if not records:
            return loss, {}
        entropy = tokens.entropy.sum()  # 0 outside the mask
        around = torch.stack([part.to(torch.float64) for part in (entropy, kl, batch.mask.sum())])
        sums = torch.cat([around[:1], weights.sums(), around[1:]])
        of_samples = batch.per_sample((own * scores).to(torch.float64))
        return loss, {"sums": sums, "scores": of_samples, "numbers": batch.sample_index}

    return loss_of


def sample_energies(tokens: TokenScores, weights: ScoreWeights, batch: MicroBatch, temperature: float) -> Tensor:
    """The sum over this rank's tokens of each sample of ||d s_t / d logits||^2, s_t the weighted score: [n] fp64."""
    if weights.masses is None or tokens.others is None:
        return batch.per_sample((tokens.energy * weights.rho.square()).to(torch.float64))
    squared, logprobs, others = temperature**2, tokens.logprobs.detach(), tokens.others.detach()
    energy = centred_energy(
        tokens.energy * squared, logprobs, weights.rho, others, weights.masses, batch.label_is_recorded
    )
    return batch.per_sample((energy / squared).to(torch.float64))


def _ones(logprobs: Tensor) -> ScoreWeights:
    return ScoreWeights(
        torch.ones_like(logprobs), None, lambda: logprobs.new_zeros(len(RATIO_SUMS), dtype=torch.float64)
    )
