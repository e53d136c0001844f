"""The toy trainer's gradient: the package's formulas applied to a matrix of score rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from oblr_megatron.algo.baseline import active_groups, advantages
from oblr_megatron.algo.formulas import NO_HISTORY, History
from oblr_megatron.algo.kl import kl_slope
from oblr_megatron.algo.loss import sample_coefficients
from oblr_megatron.algo.snr import MOMENTUM_HORIZON
from oblr_megatron.algo.thinning import sampled_energies, thinned
from oblr_megatron.algo.weighting import tempering
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.types import GradientStats
from studies.policy import Drawn, ToyPolicy, own_logprobs
from studies.rivals import Rival, Step

NormSource = Literal["exact", "logit", "length"]
"""What w is, as in `gradnorm.source` of a training run."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Scored responses of a step: N = Q * G samples in prompt-major order, rewards [Q, G] fp64."""

    samples: Sequence[Drawn]
    rewards: Tensor
    prompts: Sequence[int] = ()  # [Q] places among the training rows, for a rival

    @property
    def lengths(self) -> Tensor:
        """[Q, G] int64, response tokens."""
        return torch.tensor([len(sample.tokens) for sample in self.samples]).view(self.rewards.shape)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Results of a batch: g [P], exact w [Q, G] fp64, and the statistics that a schedule needs."""

    gradient: Tensor
    norms_sq: Tensor
    stats: GradientStats
    weights: Tensor  # [Q, G] w as baselines and pools read it
    coefficients: Tensor  # c [Q, G]; zeros under a token-wise rival
    kept: Tensor  # [Q, G] weights of the responses in c, 0 for those that `algo.keep` leaves out
    step: Step


class Estimator:
    """Estimates the policy gradient of each batch, in folds.

    Args:
        policy: the policy that drew the batch.
        algo: baseline, loss aggregation, KL penalty and signal-to-noise estimator.
        reference: the KL penalty's reference model; None without a penalty.
        source: what baselines and pools read as w. The statistics use exact norms in any case.
        token_scale: divisor of the constant aggregation if `algo.token_scale` is None.
        rival: replaces the baseline of `algo`.
    """

    def __init__(
        self,
        policy: ToyPolicy,
        algo: AlgoConfig,
        reference: ToyPolicy | None = None,
        source: NormSource = "exact",
        token_scale: float = 1.0,
        rival: Rival | None = None,
    ) -> None:
        self._policy, self._algo, self._reference, self._source = policy, algo, reference, source
        self._rival = rival
        self._token_scale = algo.token_scale or token_scale
        self._average = torch.zeros(policy.num_parameters, dtype=policy.model.dtype)  # of past gradients
        self._count = 0

    def __call__(self, batch: Batch, history: History = NO_HISTORY, seed: int = 0) -> Estimate:
        """g = 1/(Q G L) sum_i A_i s_i (or its token-wise form) minus the KL penalty's gradient, with fold statistics.

        Args:
            batch: responses and rewards.
            history: what earlier steps tell about its prompts, for pooled baselines.
            seed: of the responses that `algo.keep` leaves in.
        """
        rows, logits, tokens, mask = self._policy.scored(batch.samples)  # S [N, P], [N, T, V], [N, T], [N, T]
        norms_sq = squares(rows)
        of_tokens = energies(logits, tokens) * mask  # [N, T]
        weights = self._weights(batch, norms_sq, of_tokens)
        logprobs = own_logprobs(logits, tokens, mask)
        step = Step(batch.prompts, batch.samples, batch.rewards, weights, batch.lengths, of_tokens, logprobs)
        coefficients, kept = self._coefficients(batch, history, step), torch.ones_like(weights)
        if self._algo.keep < 1:
            kept = self._kept(batch, coefficients.view_as(weights), seed)
            coefficients = coefficients * kept.flatten()
        num_folds = len(batch.rewards) if self._algo.snr.estimator == "prompts" else self._algo.snr.num_folds
        if coefficients.dim() == 1 and self._reference is None:
            folds = fold_gradients(rows, coefficients, num_folds)
        else:
            folds = self._folds_of_tokens(batch, coefficients, num_folds)
        gradient = folds.mean(0)
        distribution = logits.log_softmax(-1)
        stats = GradientStats(
            loss=0.0,  # not used here
            sq_norm=float(squares(gradient[None])),
            fold_sq_norm_mean=float(squares(folds).mean()),
            num_folds=num_folds,
            entropy=float(-(distribution.exp() * distribution).sum(-1)[mask].mean()),
            logprob_abs_diff=0.0,
            truncated_ratio_fraction=0.0,
            num_tokens=int(batch.lengths.sum()),
            momentum_dot=self._dot(gradient),
            sample_sq_norm=float((coefficients.square() * norms_sq).sum()) if coefficients.dim() == 1 else math.nan,
        )
        own = coefficients if coefficients.dim() == 1 else torch.zeros_like(norms_sq)
        return Estimate(gradient, norms_sq.view_as(weights), stats, weights, own.view_as(weights), kept, step)

    def _weights(self, batch: Batch, norms_sq: Tensor, of_tokens: Tensor) -> Tensor:
        """`Estimate.weights`, from exact norms [N] and energies [N, T]."""
        match self._source:
            case "exact":
                return norms_sq.view(batch.rewards.shape)
            case "logit":
                return of_tokens.sum(-1).view(batch.rewards.shape)
            case "length":
                return batch.lengths.to(torch.float64)

    def _coefficients(self, batch: Batch, history: History, step: Step) -> Tensor:
        """Coefficients c [N], or [N, T] for a token-wise rival."""
        algo, weights = self._algo, step.weights
        tempered = tempering(weights, history.running_mean_norm, algo.norm_power)
        if self._rival is None:
            values = advantages(algo.baseline, step.rewards, weights, step.lengths, history) * tempered
            return self._scaled(values.flatten(), batch)
        values = self._rival.advantages(step)
        share = self._scaled(tempered.flatten(), batch)
        return values.flatten() * share if values.shape == weights.shape else values * share[:, None]

    def _kept(self, batch: Batch, coefficients: Tensor, seed: int) -> Tensor:
        """`Estimate.kept`, from the coefficients [Q, G] of all responses."""
        active = active_groups(self._algo.baseline, batch.rewards)
        energy = sampled_energies([sample.logprobs for sample in batch.samples]).view_as(coefficients)
        tokens = torch.tensor([len(sample.prompt) + len(sample.tokens) - 1 for sample in batch.samples])
        tokens, kept = tokens.view_as(coefficients), torch.zeros_like(coefficients)
        kept[active] = thinned(coefficients[active], energy[active], tokens[active], self._algo.keep, seed)
        return kept

    def _scaled(self, values: Tensor, batch: Batch) -> Tensor:
        """Numbers [N] times the constant of the aggregation."""
        (num_prompts, group_size), lengths = batch.rewards.shape, batch.lengths.flatten()
        return sample_coefficients(values, lengths, num_prompts, group_size, self._algo.aggregation, self._token_scale)

    def _folds_of_tokens(self, batch: Batch, coefficients: Tensor, num_folds: int) -> Tensor:
        """[R, P]: one pass per fold, with one coefficient per token."""
        logprobs, mask = (each.detach() for each in self._policy.logprobs(batch.samples))
        each_token = (coefficients if coefficients.dim() == 2 else coefficients[:, None]).expand(mask.shape) * mask
        if self._reference is not None:
            with torch.no_grad():
                slope = kl_slope(logprobs - self._reference.logprobs(batch.samples)[0], self._algo.kl_loss) * mask
            beta = torch.full((len(mask),), self._algo.kl_coefficient, dtype=torch.float64)
            share = self._scaled(beta, batch)
            each_token = each_token - share[:, None] * slope
        size = len(batch.samples) // num_folds
        starts = range(0, len(batch.samples), size)
        return torch.stack(
            [
                num_folds * self._policy.gradient(part, each_token[at : at + size, : longest(part)])
                for at in starts
                for part in [batch.samples[at : at + size]]
            ]
        )

    def _dot(self, gradient: Tensor) -> float:
        """<g, average of earlier gradients>, bias-corrected; then g enters the average."""
        if self._algo.snr.estimator != "momentum" or not gradient.any():
            return math.nan
        share = 1 / MOMENTUM_HORIZON
        found = float(gradient @ self._average) / (1 - (1 - share) ** self._count) if self._count else math.nan
        self._average.lerp_(gradient, share)
        self._count += 1
        return found


def energies(logits: Tensor, tokens: Tensor) -> Tensor:
    """1 - 2 pi_t + sum_v pi_t(v)^2 [N, T]: squared norm of each token's score with respect to the logits."""
    probabilities = logits.double().softmax(-1)
    chosen = probabilities.gather(-1, tokens[..., None]).squeeze(-1)
    return 1 - 2 * chosen + probabilities.square().sum(-1)


def longest(samples: Sequence[Drawn]) -> int:
    """T, the longest response in tokens."""
    return max(len(sample.tokens) for sample in samples)


def fold_gradients(rows: Tensor, coefficients: Tensor, num_folds: int) -> Tensor:
    """S [N, P], c [N] -> [R, P]: R c_f S_f, each fold's estimate of the gradient."""
    parts = zip(rows.chunk(num_folds), coefficients.to(rows.dtype).chunk(num_folds), strict=True)
    return torch.stack([num_folds * (weights @ scores) for scores, weights in parts])


def squares(rows: Tensor) -> Tensor:
    """Squared norm of each row: [n] fp64. The sum itself runs in the rows' precision."""
    return torch.linalg.vector_norm(rows, dim=1).double().square()
