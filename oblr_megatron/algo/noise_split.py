"""Noise of one prompt's gradient, split into what prompts and what responses cause, and the group size that follows.

    tr(H) = between + within,    within = V_w phi(G)
    phi(G) = 1 / (G - 1) leave-one-out, 1 / G if b reads no response of its own step

`between` is the variance of the prompts' true gradients: no baseline and no group size changes it. N = Q G responses a
step have the noise (G between + V_w G phi(G)) / N, which is least at

    G = 1 + sqrt(V_w / between) leave-one-out,    G = 1 if b reads no response of its own step

The mean product of two responses' terms of one prompt has the expectation between + signal. Two estimates of the signal
give it (snr.py): `folds`, unbiased, and `samples`, which counts such products as signal:

    cross = (S_folds + Q (S_samples - S_folds)) G / (G - 1) / c,    between = cross - S_folds

c = 1 + 1 / (G - 1)^2 leave-one-out, because two responses are in each other's baseline, else 1. This is exact for
`rloo`, and an approximation for weighted means. A baseline that is pulled towards other prompts or earlier steps has
another c. This needs exact norms: a proxy has no scale. It needs G >= 2 and two folds. A KL penalty or a router loss
must not add to g: `samples` counts their gradient as signal. Groups must not be chosen by their rewards: the products
of two responses of a chosen group have another expectation. Under tempering (`algo.norm_power`) the mean of c s is not
0 where the reward is constant, so that c above does not hold: only b without responses of its own step is split.

All estimates are in the unit of g, squared: `algo.token_scale` L divides them by L^2.
"""

from __future__ import annotations

import math
from typing import Any

from oblr_megatron.algo.snr import decay_of, folds, noise_settings, samples
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.config.baselines import facts_of
from oblr_megatron.types import GradientStats

MEANS = ("rloo", "optimal")
"""Leave-one-out baselines that are means of the other rewards alone."""


def compared_with_best(between: float, within: float, size: int, best: float) -> tuple[int, float]:
    """The G of the least noise at equal samples, and the noise with G = size as a multiple of the noise with that G.

    Args:
        between: part of the noise, above 0.
        within: part of the noise at G = size, above 0.
        size: G of the run.
        best: `snr/best_group_size`; 1 if b reads no response of its own step.

    Example: compared_with_best(90, 50, 8, 3.0) -> (3, 1.4): 8 (90 + 50) against 3 (90 + 350 / 2)
    """
    alone = best == 1
    target = 1 if alone else max(2, round(best))
    of_responses = within * (size if alone else size - 1)  # V_w
    least = target * between + of_responses * (1 if alone else target / (target - 1))
    return target, size * (between + within) / least


class NoiseSplit:
    """Averages of `between` and `within` over steps (horizon `algo.snr.horizon`).

    Args:
        algo: baseline, norm_power, keep, aggregation, kl_coefficient and snr.horizon are read.
        num_prompts: Q.
        group_size: G.
        router_losses: whether a router loss adds to the gradient.
        chosen: whether groups are chosen by their rewards (rollout.dynamic_sampling).
    """

    def __init__(
        self,
        algo: AlgoConfig,
        num_prompts: int,
        group_size: int,
        *,
        scores: str = "",
        router_losses: bool = False,
        chosen: bool = False,
    ) -> None:
        facts = facts_of(algo.baseline)
        self._alone = facts.over == "nothing" and facts.divisor == "one"
        self._defined = (
            group_size > 1
            and (self._alone or (algo.baseline in MEANS and not algo.norm_power))
            and algo.aggregation == "constant"
            and not (algo.kl_coefficient or router_losses or chosen)
        )
        self._of = {"num_prompts": num_prompts} | noise_settings(algo, group_size, scores, chosen=chosen)
        self._num_prompts, self._group_size = num_prompts, group_size
        self._measured = False  # whether the last step had folds and exact norms
        self._decay = decay_of(algo.snr)
        self._between = self._within = self._weight = 0.0

    def observe(self, stats: GradientStats) -> None:
        """Add a step; one without folds or exact norms is left out."""
        size, whole, other = self._group_size, folds(stats, self._num_prompts), samples(stats, self._num_prompts)
        self._measured = self._defined and whole.defined and other.defined
        if not self._measured:
            return
        shared = 1.0 if self._alone else 1 + 1 / (size - 1) ** 2
        cross = (whole.signal + self._num_prompts * (other.signal - whole.signal)) * size / (size - 1) / shared
        between = cross - whole.signal
        self._between = self._decay * self._between + between
        self._within = self._decay * self._within + whole.noise - between
        self._weight = self._decay * self._weight + 1

    @property
    def best_group_size(self) -> float:
        """G of the least noise at equal samples; NaN before the first step and where the averages are no variances."""
        if self._alone:
            return 1.0 if self._weight else math.nan
        if not (self._between > 0 and self._within > 0):
            return math.nan
        return 1 + math.sqrt(self._within * (self._group_size - 1) / self._between)

    def metrics(self) -> dict[str, float]:
        """The averages so far, without undefined values; {} after a step that was left out."""
        if not self._measured:
            return {}
        averages = {
            "snr/between": self._between / self._weight,
            "snr/within": self._within / self._weight,
            "snr/best_group_size": self.best_group_size,
        }
        return {name: value for name, value in averages.items() if math.isfinite(value)}

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {"between": self._between, "within": self._within, "weight": self._weight} | self._of

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; averages of another Q, or of other `noise_settings`, are ignored."""
        if all(state.get(name) == value for name, value in self._of.items()):
            self._between, self._within, self._weight = state["between"], state["within"], state["weight"]
