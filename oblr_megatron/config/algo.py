"""How the gradient is estimated and what rate it is taken with: baselines, signal and noise, schedules, recipes.

Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from oblr_megatron.config.baselines import BASELINES, BaselineName
from oblr_megatron.config.section import Section

PresetName = Literal["oblr_po", "oblr_po_paper", "opo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "otb"]

PRESETS: dict[str, dict[str, Any]] = {
    # the defaults of this file
    "oblr_po": {},
    # Theorems 4 and 7 taken at their word: the last batch stands for the truth, nothing is averaged, held or floored
    "oblr_po_paper": {
        "baseline": "optimal",
        "snr": {
            "estimator": "plugin",
            "horizon": 1.0,
            "warmup_steps": 0,
            "floor": 1e-6,
            "exponent": 1.0,
            "reference": "one",
            "max_change": 1e6,
        },
    },
    "opo": {"baseline": "opo", "schedule": "constant"},  # arXiv 2505.23585
    "grpo": {"baseline": "grpo", "aggregation": "sample_mean", "schedule": "constant"},  # arXiv 2402.03300, no KL
    "dr_grpo": {"baseline": "group_mean", "schedule": "constant"},  # arXiv 2503.20783
    "rloo": {"baseline": "rloo", "schedule": "constant"},  # arXiv 2402.14740
    "reinforce_pp": {"baseline": "reinforce_pp", "aggregation": "token_mean", "schedule": "constant"},  # 2501.03262
    "otb": {"baseline": "otb", "schedule": "constant"},  # arXiv 2602.07078
}
"""What `algo.preset` fills in; keys that are given beside it keep their values."""


class SnrConfig(Section):
    """The learning rate's signal-to-noise schedule (OBLR-PO, Theorem 4); estimates are logged for every schedule."""

    estimator: Literal["folds", "prompts", "momentum", "samples", "plugin"] = "folds"
    """What signal and noise are estimated from: "folds", num_folds folds of the batch; "prompts", every prompt as a
    fold of its own; "momentum", the gradient against the average of earlier ones (a further gradient in memory);
    "samples", norms of single responses, biased up; "plugin", the paper's likely form: ||g||^2 stands for the signal,
    near 1/2 under pure noise. The last two are for comparison."""
    momentum_horizon: float = Field(10.0, gt=1)
    """Steps over which the "momentum" estimator averages gradients."""
    num_folds: int = Field(4, ge=1)
    """Folds of whole prompts the batch is split into, whatever the schedule; a divisor of num_prompts and a multiple of
    the data-parallel size. With 1 nothing is known of the noise, and the snr schedule holds its rate."""
    horizon: float = Field(150.0, gt=0)
    """Steps over which signal and noise are averaged (exponentially, separately)."""
    warmup_steps: int = Field(10, ge=0)
    """First steps, at the rate optimizer.lr says, in which the averages are collected and not yet used."""
    floor: float = Field(0.1, gt=0, le=1)
    """Lower clamp of the averaged shrink factor."""
    exponent: float | None = Field(None, gt=0)
    """alpha in (shrink / reference)^alpha; by default 1 for SGD and 0.5 for Adam."""
    reference: Literal["one", "warmup"] = "warmup"
    """"one": the paper's rule. "warmup": divide by the shrink at the end of warm-up, so that lr keeps its meaning."""
    max_change: float = Field(1.1, gt=1)
    """The rate changes by at most this factor a step, up or down."""


class AlgoConfig(Section):
    """The estimator: baseline, aggregation, learning-rate schedule."""

    preset: PresetName | None = None
    """A recipe by name: sets baseline, aggregation, schedule and snr as it is published; other keys given here win."""
    baseline: BaselineName = "optimal_prior"
    """What is subtracted from the reward; "optimal" is OBLR-PO's leave-one-out estimate of Theorem 7."""
    prior_strength: float = Field(1.0, ge=0)
    """lambda of optimal_prior and rloo_prior: weight of the other prompts' mean reward, in units of the group's mean
    norm."""
    length_exponent: float = Field(1.0, ge=0)
    """p of length_loo: weights are response length ** p."""
    aggregation: Literal["constant", "token_mean", "sample_mean"] = "constant"
    """Divisor of the loss. Only "constant" (1 / (Q G)) keeps the gradient unbiased; the others are for comparison."""
    kl_coefficient: float = Field(0.0, ge=0)
    """beta of a penalty on the divergence from the model the run began with; its gradient joins g, w stays the
    score's norm. A second set of weights in memory, and a forward pass more."""
    kl_loss: Literal["k2", "k3"] = "k3"
    """Its form a token, d = log pi - log pi_ref: "k2", d^2 / 2, whose gradient is the divergence's own in expectation;
    "k3", exp(-d) - 1 + d (GRPO's), whose gradient is bounded where pi_ref is small."""
    schedule: Literal["constant", "cosine", "snr", "shuffled", "matched_decay"] = "snr"
    """Learning-rate schedule. The last two are controls that take their rates from an earlier run, schedule_from:
    "shuffled", the same rates in another order; "matched_decay", their log-linear trend with the same mean."""
    schedule_from: Path | None = None
    """The run directory whose rates a control takes up."""
    snr: SnrConfig = SnrConfig()
    """Settings of the "snr" schedule; its estimates are logged for every schedule."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, given: Any) -> Any:
        """The recipe's keys, under those that are given."""
        recipe = PRESETS.get(given.get("preset") or "", {}) if isinstance(given, dict) else {}
        if not recipe:
            return given
        snr = given.get("snr", {})
        snr = snr if isinstance(snr, dict) else snr.model_dump(exclude_unset=True)
        return {**recipe, **given, "snr": {**recipe.get("snr", {}), **snr}}

    @property
    def token_wise(self) -> bool:
        """Whether each token has an advantage of its own."""
        return BASELINES[self.baseline].token_wise
