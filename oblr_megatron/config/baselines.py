"""Facts about every baseline, read by config checks, the memory model and the algorithm. Imports no torch.

To add a baseline, add its name and its facts here and its formula to `algo/formulas.py`. To remove one, delete both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BaselineName = Literal[
    "none",
    "group_mean",
    "grpo",
    "batch_mean",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "rloo_prior",
    "james_stein",
    "median_loo",
    "opo",
    "length_loo",
    "eob",
    "optimal",
    "optimal_prior",
    "pooled_mean",
    "pooled",
    "optimal_pooled",
]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a baseline b_i reads and how it enters the advantage A_i = (r_i - b_i) / divisor."""

    over: Literal["nothing", "others", "group", "batch"]
    """The responses of its own step that b_i averages. "others" leaves response i out, which keeps g unbiased."""
    needs_norms: bool = False
    """Whether b_i reads the squared gradient norms w of its own step, so that they are needed before the gradient."""
    pool: Literal["", "plain", "norms"] = ""
    """Weights of the rewards of earlier steps that b_i averages: all equal, or w; "": none are read."""
    prior: bool = False
    """Whether a part of b_i comes from the other prompts of the batch, so that it needs two prompts."""
    divisor: Literal["one", "group_std", "batch_std", "centred_std"] = "one"
    """What A is divided by: the standard deviation of rewards of the group or batch, or of r - b over the batch."""

    @property
    def needs_group(self) -> bool:
        """Whether G = 1 makes no sense: b_i has no other response, or is r_i itself, so that A = 0 always."""
        return self.over in ("others", "group")

    @property
    def zero_on_equal(self) -> bool:
        """Whether A is exactly 0 in a group of equal rewards, so that its passes may be skipped."""
        return self.over in ("others", "group") and not (self.prior or self.pool)


BASELINES: dict[BaselineName, Baseline] = {
    "none": Baseline("nothing"),
    "group_mean": Baseline("group"),
    "grpo": Baseline("group", divisor="group_std"),
    "batch_mean": Baseline("batch"),
    "reinforce_pp": Baseline("batch", divisor="batch_std"),
    "reinforce_pp_baseline": Baseline("group", divisor="centred_std"),
    "rloo": Baseline("others"),
    "rloo_prior": Baseline("others", prior=True),
    "james_stein": Baseline("others", prior=True),
    "median_loo": Baseline("others"),
    "opo": Baseline("group"),
    "length_loo": Baseline("others"),
    "eob": Baseline("group", needs_norms=True),
    "optimal": Baseline("others", needs_norms=True),
    "optimal_prior": Baseline("others", needs_norms=True, prior=True),
    "pooled_mean": Baseline("nothing", pool="plain"),
    "pooled": Baseline("nothing", pool="norms"),
    "optimal_pooled": Baseline("others", needs_norms=True, pool="norms"),
}
"""The facts of each baseline by name."""
