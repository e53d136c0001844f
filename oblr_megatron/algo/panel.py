"""What the batch just used says of baselines: the variance under each of them, and how sound the run's own is.

Shapes: rewards, norms_sq, lengths are [Q, G]. Exact for the batch, from rewards and norms at hand; nothing is passed
through the model again.
"""

from __future__ import annotations

from torch import Tensor

from oblr_megatron.algo.baseline import baseline_values
from oblr_megatron.algo.formulas import FORMULAS
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.config.baselines import BASELINES, BaselineName

PANEL = tuple(
    name for name, facts in BASELINES.items() if not facts.token_wise and facts.divisor == "one" and name != "rloo"
)
"""The baselines that are compared with rloo.

Left out: `otb`, whose b_t needs the energy of every token and the norm of every token's score; `grpo`, whose divisor
differs from group to group and so weighs prompts by itself (its b is group_mean's); `reinforce_pp`, which divides the
whole batch by one number (its ratio is batch_mean's).
"""


def variance_ratios(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig) -> dict[str, float]:
    """sum A_i^2 w_i over that of rloo for each baseline of the PANEL; below 1, it beats rloo's.

    An estimate of E||A s||^2, the second moment of one response's term of the gradient (what it leaves out:
    `baseline.variance_ratio_vs_rloo`). A baseline with o_i in it makes A smaller by its own share in it, on average 1/G
    of a group's mean and 1/(Q G) of the batch's, which the learning rate would make up for: A is divided by 1 less that
    share, and group_mean is level with rloo. Sums are over the groups whose norms were measured.

    Returns {} where G = 1, no norm is known, or rloo's sum is 0 (every measured group of equal rewards).

    Args:
        rewards: fp64.
        norms_sq: w, finite; a row of zeros is a group that was not measured.
        lengths: response tokens, fp64.
        options: prior_strength and length_exponent are read.
    """
    if rewards.shape[1] == 1:
        return {}

    def second_moment(name: BaselineName) -> float:
        centred = rewards - FORMULAS[name](rewards, norms_sq, lengths, options)
        return float((centred.square() * norms_sq).sum()) / (1 - own_share(name, rewards)) ** 2

    reference = second_moment("rloo")
    defined = [name for name in PANEL if rewards.shape[0] > 1 or not BASELINES[name].prior]
    return {name: second_moment(name) / reference for name in defined} if reference > 0 else {}


def own_share(name: BaselineName, rewards: Tensor) -> float:
    """What a response's own reward weighs in its baseline, averaged over the group or batch that it is the mean of."""
    match BASELINES[name].over:
        case "group":
            return 1 / rewards.shape[1]
        case "batch":
            return 1 / rewards.numel()
        case _:
            return 0.0


def spread(baseline: Tensor) -> float:
    """Standard deviation over prompts of b [Q, G] averaged over the group."""
    return float(baseline.mean(-1).std(correction=0))


def self_dependence(
    name: BaselineName, baseline: Tensor, rewards: Tensor, norms_sq: Tensor, lengths: Tensor, options: AlgoConfig
) -> float:
    """|change of b_i| for a change of r_i by 1: 0 where b is a function of the other responses alone.

    The baseline is evaluated once more, with one reward changed: that of the response with the largest w, or where none
    is measured of the longest one, since these weigh most in a weighted mean.

    Args:
        name: the run's baseline.
        baseline: [Q, G] its values.
        rewards: fp64.
        norms_sq: w, finite; zeros where none are measured.
        lengths: response tokens.
        options: as for the baseline.
    """
    probe = int((norms_sq if norms_sq.any() else lengths).argmax())
    changed = rewards.clone()
    changed.view(-1)[probe] += 1.0
    after = baseline_values(name, changed, norms_sq, lengths, options)
    return abs(float(after.reshape(-1)[probe] - baseline.reshape(-1)[probe]))
