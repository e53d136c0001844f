"""Section [algo]: baselines, aggregation, learning-rate schedules and published recipes. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from oblr_megatron.config.baselines import BASELINES
from oblr_megatron.config.section import Section

PresetName = Literal[
    "oblr_pooled",
    "oblr_tempered",
    "oblr_po",
    "opo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "dapo",
    "gspo",
    "cispo",
]

PRESETS: dict[str, dict[str, Any]] = {
    "oblr_pooled": {"baseline": "pooled", "schedule": "constant"},  # this project's own
    "oblr_tempered": {"baseline": "pooled", "norm_power": 0.25, "schedule": "constant"},  # the same, norms tempered
    # OBLR-PO, arXiv 2511.23310, as far as its text is known (docs/algorithm.md): Theorems 4 and 7 with estimates of one
    # batch, without averages, floor or bound on the change, and in the theorems' unit. Its rate is meant for SGD.
    "oblr_po": {
        "baseline": "optimal",
        "token_scale": 1.0,
        "schedule": "snr",
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
    # Several clipped updates on a batch, off-policy (docs/corrections.md).
    "dapo": {  # arXiv 2503.14476; also wants rollout.dynamic_sampling and the reward term overlong
        "baseline": "grpo",
        "aggregation": "token_mean",
        "schedule": "constant",
        "updates_per_batch": 16,
        "clip_low": 0.2,
        "clip_high": 0.28,
    },
    "gspo": {  # arXiv 2507.18071
        "baseline": "grpo",
        "aggregation": "sample_mean",
        "schedule": "constant",
        "updates_per_batch": 4,
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    "cispo": {  # arXiv 2506.13585, with the bound 5 of arXiv 2510.13786
        "baseline": "grpo",
        "aggregation": "token_mean",
        "schedule": "constant",
        "updates_per_batch": 16,
        "surrogate": "cispo",
        "clip_high": 4.0,
    },
}
"""Values that `algo.preset` fills in. Keys in the same file win over them."""


def open_to_preset(algo: Any, preset: str) -> Any:
    """[algo] of a file without the keys that recipes set, so that a preset of the command line is the method.

    The preset "none" sets nothing, so all keys stay.
    Of [algo.snr] the recipe's own keys give way. A run's config.json has every key: there those of all recipes do.
    """
    if preset == "none" or not isinstance(algo, dict) or not isinstance(algo.get("snr", {}), dict):
        return algo  # validation names what is wrong
    keys = {"clip_dual"} | {key for recipe in PRESETS.values() for key in recipe}  # of clipping, which they all decide
    recipes = PRESETS.values() if keys <= algo.keys() else [PRESETS.get(preset, {})]
    of_snr = {key for recipe in recipes for key in recipe.get("snr", {})}
    snr = {key: value for key, value in algo.get("snr", {}).items() if key not in of_snr}
    return {key: value for key, value in algo.items() if key not in keys} | {"snr": snr}


class SnrConfig(Section):
    """The signal-to-noise schedule of the learning rate (OBLR-PO, Theorem 4). Its estimates are always logged."""

    estimator: Literal["folds", "prompts", "momentum", "samples", "plugin"] = "folds"
    """Estimator of signal and noise. "folds": from num_folds folds of the batch. "prompts": each prompt is a fold.
    "momentum": the gradient against the average of the last 10 or so. For comparison only: "samples", from
    per-response norms, and "plugin" (docs/metrics.md)."""
    num_folds: int = Field(4, ge=1)
    """Folds of whole prompts that the batch is split into, under every schedule. Must divide num_prompts and be a
    multiple of the data-parallel size; four times that size lets replicas share tokens equally. With 1 the noise is
    unknown. The "momentum" and "prompts" estimators ignore it."""
    horizon: float = Field(150.0, gt=0, le=1e12)
    """Steps over which signal and noise are averaged (two exponential averages)."""
    warmup_steps: int = Field(10, ge=0)
    """First steps with an estimate. They only collect the averages; the rate is optimizer.lr."""
    floor: float = Field(0.1, gt=0, le=1)
    """Lower bound of the averaged shrink factor."""
    exponent: float | None = Field(None, gt=0)
    """alpha in (shrink / reference)^alpha; by default 1 for SGD and 0.5 for Adam."""
    reference: Literal["one", "warmup"] = "warmup"
    """"one": the paper's rule. "warmup": divide by the shrink at the end of warm-up, so that the rate starts at lr."""
    max_change: float = Field(1.1, gt=1)
    """Largest factor by which the rate may rise or fall in one step."""

    @property
    def needs_folds(self) -> bool:
        """Whether folds are computed. Only "momentum" does without; under "samples" they serve the metrics."""
        return self.estimator != "momentum"

    @property
    def reads_num_folds(self) -> bool:
        """Whether `num_folds` is the number of folds; with "prompts" each prompt is one."""
        return self.estimator not in ("momentum", "prompts")


class AlgoConfig(Section):
    """The gradient estimator: baseline, aggregation, KL penalty, learning-rate schedule."""

    preset: PresetName | None = None
    """A recipe. Sets baseline, norm_power, aggregation, token_scale, schedule, snr, updates_per_batch and clipping;
    other keys given here win. A preset of the command line wins over the keys of a file."""
    baseline: str = "pooled"
    """Subtracted from the reward: a name of docs/algorithm.md, or your own "package.module:function". "pooled" is the
    norm-weighted mean reward of earlier steps."""
    pool_decay: float = Field(0.9, ge=0, lt=1)
    """rho of pooled, pooled_mean and optimal_pooled: weight of the earlier steps' sums when a step is added."""
    norm_power: float = Field(0.0, ge=0, le=0.5)
    """gamma of norm tempering: each response's coefficient is multiplied by (wbar / w)^gamma. Above 0 the gradient is
    biased, with less noise (docs/algorithm.md)."""
    keep: float = Field(1.0, gt=0, le=1)
    """Share of the tokens that go through the gradient pass, on average. Below 1 responses are left out at random.
    Unbiased, with more noise (docs/algorithm.md)."""
    aggregation: Literal["constant", "token_mean", "sample_mean"] = "constant"
    """Divisor of the loss. Only "constant", 1 / (Q G token_scale), keeps the gradient unbiased (before clipping); the
    others are for comparison."""
    token_scale: float | None = Field(None, gt=0)
    """Tokens that the constant aggregation divides by, so that clip_grad has the usual unit. By default
    rollout.max_response_tokens, as in Dr. GRPO. 1: sums over tokens, as in the formulas of papers."""
    kl_coefficient: float = Field(0.0, ge=0)
    """beta of a KL penalty against the initial model. Costs a second copy of the weights and one more forward pass."""
    kl_loss: Literal["k2", "k3"] = "k3"
    """Penalty per token, with d = log pi - log pi_ref. "k2": d^2 / 2; its expected gradient is that of the KL
    divergence. "k3" (GRPO): exp(-d) - 1 + d; its gradient stays bounded where pi_ref is small."""
    schedule: Literal["constant", "cosine", "snr"] = "constant"
    """Learning-rate schedule. "snr" is OBLR-PO's (Theorem 4)."""
    snr: SnrConfig = SnrConfig()
    """Settings of the "snr" schedule."""
    updates_per_batch: int = Field(1, ge=1)
    """U, optimizer updates on the samples of a step, each on the next Q / U prompts. Above 1 no norms are measured
    (docs/corrections.md)."""
    center: bool = False
    """Subtract the engine's expected weighted score at every prefix, so that the mean score is 0 under a cap on ratios
    and under token rejection (docs/corrections.md)."""
    center_tokens: int = Field(32, ge=1, le=4096)
    """Most likely tokens of each prefix that the expectation runs over. A drawn token that is not among them has no
    weight. A rollout.top_k of at most this number leaves out none."""
    ratio: Literal["token", "sequence"] = "token"
    """Ratio of the policy to that before the first update: of each token, or the geometric mean over the response
    (GSPO)."""
    surrogate: Literal["ppo", "cispo"] = "ppo"
    """Quantity clipped in later updates: the objective ("ppo"), or the weight of each token's gradient ("cispo")."""
    clip_low: float | None = Field(None, gt=0)
    """Lower bound of the ratio: 1 - clip_low. By default none."""
    clip_high: float | None = Field(None, gt=0)
    """Upper bound of the ratio: 1 + clip_high. By default none."""
    clip_dual: float | None = Field(None, gt=1)
    """Largest ratio of a token with a negative advantage (dual clip; clip_ratio_c in verl). By default none."""

    @field_validator("baseline")
    @classmethod
    def _known_or_own(cls, name: str) -> str:
        if name not in BASELINES and ":" not in name:
            fix = f'use one of {", ".join(map(repr, BASELINES))}, or your own "package.module:function"'
            raise PydanticCustomError("unknown_baseline", "no baseline has this name", {"fix": fix})
        return name

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, given: Any) -> Any:
        """Merge the recipe with the given keys; given keys win."""
        preset = given.get("preset") if isinstance(given, dict) else None
        recipe = PRESETS.get(preset) if isinstance(preset, str) else None
        snr = given.get("snr", {}) if recipe else None
        snr = snr.model_dump(exclude_unset=True) if isinstance(snr, SnrConfig) else snr
        if not recipe or not isinstance(snr, dict):
            return given
        return {**recipe, **given, "snr": {**recipe.get("snr", {}), **snr}}

    @property
    def clips(self) -> bool:
        """Whether any key is set that affects only a batch's later updates."""
        bounds = (self.clip_low, self.clip_high, self.clip_dual)
        return bounds != (None, None, None) or (self.ratio, self.surrogate) != ("token", "ppo")
