"""Compare baselines on the current batch: the variance under each, and whether the run's own is leave-one-out.

Shapes: rewards, norms_sq, lengths are [Q, G]. The results use only known rewards and norms; no model pass is needed.
"""

from __future__ import annotations

from torch import Tensor

from oblr_megatron.algo.baseline import baseline_values
from oblr_megatron.algo.formulas import FORMULAS, NO_HISTORY, History
from oblr_megatron.config.baselines import BASELINES, facts_of

PANEL = tuple(name for name, facts in BASELINES.items() if facts.divisor == "one" and name != "rloo")
"""The baselines that are compared with rloo. Left out:

- `grpo`: its divisor differs between groups and so weights prompts differently (b is that of group_mean).
- `reinforce_pp`: it divides the whole batch by one number, so that its ratio is that of batch_mean.
- a user's own: `baseline.variance_ratio_vs_rloo` is the ratio of the run's baseline.
"""


def variance_ratios(
    rewards: Tensor, norms_sq: Tensor, lengths: Tensor, of_run: str, history: History = NO_HISTORY
) -> dict[str, float]:
    """sum A_i^2 w_i relative to rloo's, for each baseline of the PANEL. Below 1 the baseline beats rloo.

    `baseline.variance_ratio_vs_rloo` says what this estimates, and its limits. A baseline that includes o_i shrinks A
    by o_i's share in it: on average 1/G for a group's mean and 1/(Q G) for the batch's. A learning rate would
    compensate for that scale, so A is divided by 1 - share. group_mean then equals rloo. Sums run over the groups with
    measured norms.

    Arguments as for `baseline_values`, floats in fp64. `of_run` is the run's baseline, and `history` is its history. A
    row of zeros in w marks a group that was not measured.

    Returns:
        name -> ratio; {} if G = 1, no norm is known, or rloo's sum is 0 (every measured group has equal rewards).
    """
    if rewards.shape[1] == 1:
        return {}

    def second_moment(name: str) -> float:
        centred = rewards - FORMULAS[name](rewards, norms_sq, lengths, history)
        return float((centred.square() * norms_sq).sum()) / (1 - own_share(name, rewards)) ** 2

    rloo = second_moment("rloo")
    defined = [name for name in PANEL if _defined(name, of_run)]
    return {name: second_moment(name) / rloo for name in defined} if rloo > 0 else {}


def _defined(name: str, of_run: str) -> bool:
    """Whether this batch, with the history of the run's own baseline, tells the values of another baseline."""
    facts = BASELINES[name]
    if facts_of(of_run).zero_on_equal and not facts.zero_on_equal:
        return False  # it also has variance in groups of equal rewards, which the run does not measure
    return not facts.pool or name == of_run or (facts.pool == facts_of(of_run).pool and facts.over == "nothing")


def own_share(name: str, rewards: Tensor) -> float:
    """The weight of a response's own reward in its baseline, averaged over the responses that the baseline averages."""
    match facts_of(name).over:
        case "group":
            return 1 / rewards.shape[1]
        case "batch":
            return 1 / rewards.numel()
        case _:
            return 0.0


def spread(baseline: Tensor) -> float:
    """Standard deviation over prompts of the group's mean b, from b [Q, G]."""
    return float(baseline.mean(-1).std(correction=0))


def self_dependence(
    name: str,
    baseline: Tensor,
    rewards: Tensor,
    norms_sq: Tensor,
    lengths: Tensor,
    history: History = NO_HISTORY,
) -> float:
    """|change of b_i| if r_i changes by 1; 0 for a leave-one-out baseline.

    Evaluates the baseline again with one reward changed. That response has the largest w, or the greatest length if no
    norm was measured, because it has the largest weight in a weighted mean.

    Arguments as for `baseline_values`, and the values `baseline` [Q, G] that it returned.
    """
    probe = int((norms_sq if norms_sq.any() else lengths).argmax())
    changed = rewards.clone()
    changed.view(-1)[probe] += 1.0
    after = baseline_values(name, changed, norms_sq, lengths, history)
    return abs(float(after.reshape(-1)[probe] - baseline.reshape(-1)[probe]))
