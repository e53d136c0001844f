"""Published methods that no function of `algo.baseline` expresses. In the toy trainer they take the baseline's place.

    rival                   advantage of response i                                          source
    otb                     a baseline for each token (token_baseline.py)                    arXiv 2602.07078
    opob                    (r_i - b) / std, b = sum_j w_j r_j / sum_j w_j over the group    arXiv 2602.17616
    dbb                     (r_i - p) / sqrt(p (1 - p)), p of a discounted Beta              arXiv 2603.18444
    spo                     r_i - p of a Beta tracker, whitened; prompts by p                arXiv 2509.13232
    vl_norm                 grpo's, divided by the length                                    arXiv 2509.07558
    advantage_reweighting   grpo's, times alpha pi_t + 1 - alpha at token t                  arXiv 2505.12929

Rewards of dbb and spo lie between 0 and 1. Two rivals are missing. DPPO (arXiv 2603.04135) prunes the gradient pass of
GRPO without bias, so that it saves passes and no samples; its rule was not available to us. The prompt law of CurES
(arXiv 2510.01037; github.com/ZexuSun/CurES, 2025-09-25) is uniform to 0.5%: it is the softmax of sqrt(p (1 - p)) / t
with t = 100 (successes + 1). Its quotas need 4 responses to each prompt in advance, three times the samples of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from oblr_megatron.algo.baseline import advantages
from studies.policy import Drawn, ToyPolicy
from studies.token_baseline import otb

RivalName = Literal["none", "otb", "opob", "dbb", "spo", "vl_norm", "advantage_reweighting"]
OPOB_EPS = 1e-8
DBB_DISCOUNT = 0.5  # lambda; the authors use it for their smaller model
SPO_EPS = 1e-8
SPO_OFFLINE = 8  # responses to each prompt before training
SPO_FORGETTING = (0.875, 0.96)  # least and largest rho
SPO_HALF_LIFE = 0.06  # D_half, mean |change of a token's log-prob|
SPO_FLOOR = 0.05  # of a prompt's weight
LENGTH_POWER = 1.0  # alpha of vl_norm
TOKEN_SHARE = 0.2  # alpha of advantage_reweighting


@dataclass(frozen=True, slots=True)
class Step:
    """Scored responses of a step: Q prompts, G responses each, N = Q G in prompt-major order, T tokens at most."""

    prompts: Sequence[int]  # [Q] places among the training rows
    samples: Sequence[Drawn]
    rewards: Tensor  # [Q, G] fp64
    weights: Tensor  # [Q, G] w
    lengths: Tensor  # [Q, G] tokens
    energies: Tensor  # [N, T] squared norm of each token's score at the logits
    logprobs: Tensor  # [N, T]


class Rival(ABC):
    """A method without state that draws the usual prompts.

    Args:
        num_rows: training prompts.
        seed: of its own draws.
    """

    groups: ClassVar[Literal["any", "several", "one"]] = "several"
    """Responses that it needs to a prompt."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def begin(self, offline: Callable[[int], Tensor]) -> None:  # noqa: B027  # most methods have no state
        """Before the first step. `offline(n)` gives rewards [rows, n] of n responses to every training prompt."""

    def prompts(self, usual: list[int]) -> list[int]:
        """The prompts of a step; `usual` are those of a shuffled pass."""
        return usual

    @abstractmethod
    def advantages(self, step: Step) -> Tensor:
        """A [Q, G] fp64, or [N, T] with a value for each token."""

    def observe(self, step: Step, policy: ToyPolicy) -> None:  # noqa: B027
        """After the update: the step, and the policy that it made."""


class Otb(Rival):
    """The Optimal Token Baseline."""

    def advantages(self, step: Step) -> Tensor:
        return otb(step.rewards, step.energies, step.lengths)


class Opob(Rival):
    """VCPO's Optimal Off-Policy Baseline, on policy: all importance weights are 1.

    b is the group's mean reward weighted with w, o_i included, so that the direction is biased; `optimal` leaves o_i
    out. A is divided by the group's standard deviation (denominator G) where that is above 1e-8. The published rate is
    multiplied by the root of the effective share (sum rho)^2 / (N sum rho^2) of the importance weights: here 1.
    Equations of the authors' code with the settings of its scripts (mit-han-lab/vcpo, 2026-03-02:
    staleness_utils.py `compute_opob_baseline`, megatron_actor.py `_update_grad_buffers`).
    """

    def advantages(self, step: Step) -> Tensor:
        rewards, weights = step.rewards, step.weights
        mean = (weights * rewards).sum(-1, keepdim=True) / (weights.sum(-1, keepdim=True) + OPOB_EPS)
        spread = rewards.std(-1, correction=0, keepdim=True)
        return (rewards - mean) / torch.where(spread > OPOB_EPS, spread, 1.0)


class Dbb(Rival):
    """GRPO with Discounted Beta-Bernoulli reward estimation: alpha <- lambda alpha + S, beta <- lambda beta + G - S.

    S is the sum of the group's rewards. Each prompt begins with alpha = beta = 1, and p = alpha / (alpha + beta)
    includes the group itself. Equations 11 to 13 and Algorithm 1 of arXiv 2603.18444 (v1, 2026-03-19); no code was
    published. Biased, because p reads o_i and earlier policies.
    """

    groups = "any"

    def __init__(self, num_rows: int, seed: int) -> None:
        super().__init__(num_rows, seed)
        self._counts = torch.ones(num_rows, 2, dtype=torch.float64)  # alpha, beta

    def advantages(self, step: Step) -> Tensor:
        counts = self._posterior(step)
        rate = (counts[:, 0] / counts.sum(-1))[:, None]
        return (step.rewards - rate) / (rate * (1 - rate)).sqrt()

    def observe(self, step: Step, policy: ToyPolicy) -> None:
        self._counts[list(step.prompts)] = self._posterior(step)

    def _posterior(self, step: Step) -> Tensor:
        right = step.rewards.sum(-1)
        new = torch.stack([right, step.rewards.shape[1] - right], dim=-1)
        return DBB_DISCOUNT * self._counts[list(step.prompts)] + new


class Spo(Rival):
    """Single-stream Policy Optimization, at G = 1: a Beta tracker of each prompt, and prompts drawn by it.

        p = alpha / (alpha + beta)          A = (r - p - mean) / std over the batch
        alpha <- rho alpha + r              beta <- rho beta + 1 - r
        rho = 2^(-D / 0.06), clamped        D: mean |change of log pi| of the prompt's last response since it was seen

    A step draws Q different prompts of all with weights sqrt(p (1 - p)) + 0.05 and does not correct for that. The
    tracker begins with the rates of 8 responses to every prompt. This study does not count these 32,768 samples, six
    times those of a run: that favours SPO. Equations of the authors' code (recipe/spo/spo_ray_trainer.py of verl,
    2025-11-18; verl-recipe, 2026-08-05).
    """

    groups = "one"

    def __init__(self, num_rows: int, seed: int) -> None:
        super().__init__(num_rows, seed)
        self._counts = torch.empty(0)
        self._last: dict[int, tuple[Drawn, Tensor]] = {}  # the last response and its log-probs after that update

    def begin(self, offline: Callable[[int], Tensor]) -> None:
        rewards = offline(SPO_OFFLINE)
        right, count = rewards.sum(-1), 1 / (1 - SPO_FORGETTING[0])
        self._counts = count * (torch.stack([right, SPO_OFFLINE - right], -1) + 0.5) / (SPO_OFFLINE + 1)

    @property
    def rates(self) -> Tensor:
        """p of every training prompt."""
        return self._counts[:, 0] / self._counts.sum(-1)

    def prompts(self, usual: list[int]) -> list[int]:
        weights = ((self.rates * (1 - self.rates)).sqrt() + SPO_FLOOR).numpy()
        drawn = self._random.choice(len(weights), size=len(usual), replace=False, p=weights / weights.sum())
        return [int(row) for row in drawn]

    def advantages(self, step: Step) -> Tensor:
        values = step.rewards - self.rates[list(step.prompts)][:, None]
        return (values - values.mean()) / (values.std() + SPO_EPS)

    @torch.no_grad()
    def observe(self, step: Step, policy: ToyPolicy) -> None:
        seen = [self._last.get(row, (sample, None)) for row, sample in zip(step.prompts, step.samples, strict=True)]
        now, mask = policy.logprobs([*(sample for sample, _ in seen), *step.samples])
        lowest, largest = SPO_FORGETTING
        for place, (row, (_, before)) in enumerate(zip(step.prompts, seen, strict=True)):
            moved = 0.0 if before is None else float((now[place][mask[place]] - before).abs().mean())
            kept = min(largest, max(lowest, 2 ** (-moved / SPO_HALF_LIFE)))
            reward = float(step.rewards[place, 0])
            self._counts[row] = kept * self._counts[row] + torch.tensor([reward, 1 - reward])
            own = len(seen) + place
            self._last[row] = step.samples[place], now[own][mask[own]]


class VlNorm(Rival):
    """Delta-L (VL) normalization: GRPO's advantages times L_i^-alpha over its mean over the batch, alpha = 1.

    It needs algo.aggregation = "constant". A has the group's standard deviation as divisor. Equations of the authors'
    code (zerolllin/Delta-L-Normalization, as of 2026-11: core_algos.py `compute_grpo_outcome_advantage`, `use_grpopp`).
    """

    def advantages(self, step: Step) -> Tensor:
        inverse = step.lengths.to(torch.float64).pow(-LENGTH_POWER)
        return _grpo(step) * inverse / inverse.mean()


class AdvantageReweighting(Rival):
    """GRPO with the advantage at token t times alpha pi_t + 1 - alpha, so that unlikely tokens count less.

    Equation of the authors' code (zhyang2226/AR-Lopti, 2025-05-20: `compute_reweight_advantage`, "both_linear_normal",
    alpha = 0.2 as in its script without Lopti).
    """

    def advantages(self, step: Step) -> Tensor:
        shares = TOKEN_SHARE * step.logprobs.to(torch.float64).exp() + 1 - TOKEN_SHARE
        return _grpo(step).flatten()[:, None] * shares


def _grpo(step: Step) -> Tensor:
    return advantages("grpo", step.rewards, step.weights, step.lengths)


RIVALS: dict[str, type[Rival]] = {
    "otb": Otb,
    "opob": Opob,
    "dbb": Dbb,
    "spo": Spo,
    "vl_norm": VlNorm,
    "advantage_reweighting": AdvantageReweighting,
}
"""The rivals by name; `RivalName` has the same names, and "none"."""
