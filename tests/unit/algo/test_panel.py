"""The panel against sums by hand, against enumeration, and on baselines that include their own response.

Not covered: how well the second moment approximates the variance (`study variance` measures that).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oblr_megatron.algo import panel
from oblr_megatron.algo.baseline import baseline_values, variance_ratio_vs_rloo
from oblr_megatron.algo.formulas import FORMULAS, History
from oblr_megatron.config.baselines import BASELINES, Baseline

RUN = "reinforce_pp"
Q, G = 6, 4


def batch(seed: int = 0, num_prompts: int = Q, group: int = G) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    rewards = (torch.rand(num_prompts, group, generator=random) < 0.4).double()
    norms = torch.rand(num_prompts, group, generator=random, dtype=torch.float64) * (1 + 5 * rewards)
    return rewards, norms, torch.randint(1, 30, (num_prompts, group), generator=random).double()


def test_a_batch_by_hand() -> None:
    """One group with rewards 1, 0, 0 and w = 4, 1, 1: rloo has A = 1, -1/2, -1/2 and the sum 4.5."""
    rewards, norms = torch.tensor([[1.0, 0.0, 0.0]]).double(), torch.tensor([[4.0, 1.0, 1.0]]).double()
    found = panel.variance_ratios(rewards, norms, torch.ones(1, 3).double(), RUN)
    # optimal: A = 1, -4/5, -4/5 -> 5.28. none: 4. group_mean: A = 2/3, -1/3, -1/3, rescaled to rloo's.
    equal = dict.fromkeys(("group_mean", "batch_mean", "opo"), 1.0)
    wanted = {"none": 4 / 4.5, "optimal": 5.28 / 4.5} | equal
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_leave_one_out_baselines_have_the_ratio_of_variance_ratio_vs_rloo(seed: int) -> None:
    rewards, norms, lengths = batch(seed)
    found = panel.variance_ratios(rewards, norms, lengths, RUN)
    for name in ("none", "optimal"):
        values = baseline_values(name, rewards, norms, lengths)
        assert found[name] == pytest.approx(variance_ratio_vs_rloo(rewards, norms, values), rel=1e-12)


def test_what_the_panel_leaves_out() -> None:
    assert set(BASELINES) - set(panel.PANEL) == {"grpo", "reinforce_pp", "rloo"}
    pooled = {name for name, facts in BASELINES.items() if facts.pool}
    assert set(panel.variance_ratios(*batch(), RUN)) == set(panel.PANEL) - pooled


@pytest.mark.parametrize(
    ("of_run", "shown"),
    [("pooled", {"pooled"}), ("pooled_mean", {"pooled_mean"}), ("optimal_pooled", {"pooled", "optimal_pooled"})],
)
def test_pooled_baselines_are_shown_where_the_run_has_their_pool(of_run: str, shown: set[str]) -> None:
    rewards, norms, lengths = batch()
    history = History(torch.linspace(0, 1, Q, dtype=torch.float64), 0.25)
    found = panel.variance_ratios(rewards, norms, lengths, of_run, history)
    assert {name for name in found if BASELINES[name].pool} == shown
    values = baseline_values(of_run, rewards, norms, lengths, history)
    assert found[of_run] == pytest.approx(variance_ratio_vs_rloo(rewards, norms, values), rel=1e-12)


@pytest.mark.parametrize("of_run", ["optimal", "rloo"])
def test_baselines_with_variance_in_equal_groups_are_left_out_where_the_run_skips_these(of_run: str) -> None:
    """Half of the prompts are solved, and their norms are not measured: `none` has A = 1 there."""
    rewards, norms, lengths = batch()
    shown = set(panel.variance_ratios(rewards, norms, lengths, of_run))
    assert shown and not shown & {"none", "batch_mean"}
    assert {"none", "batch_mean"} <= set(panel.variance_ratios(rewards, norms, lengths, "reinforce_pp"))


def test_own_share_is_the_weight_of_a_response_in_its_own_baseline() -> None:
    """Measured by changing each reward in turn, averaged over the responses."""
    rewards, norms, lengths = batch()
    for name in panel.PANEL:
        shares = torch.zeros(Q * G, dtype=torch.float64)
        before = baseline_values(name, rewards, norms, lengths).flatten()
        for n in range(Q * G):
            changed = rewards.clone()
            changed.view(-1)[n] += 1
            shares[n] = baseline_values(name, changed, norms, lengths).flatten()[n] - before[n]
        assert float(shares.mean()) == pytest.approx(panel.own_share(name, rewards), abs=1e-12), name


def test_groups_without_measured_norms_do_not_count() -> None:
    rewards, norms, lengths = batch()
    norms[2] = 0.0
    rewards[2] = 1.0 - rewards[2]
    found = panel.variance_ratios(rewards, norms, lengths, RUN)
    kept = [0, 1, 3, 4, 5]
    for name in ("none", "group_mean", "optimal"):  # baselines within the group
        alone = panel.variance_ratios(rewards[kept], norms[kept], lengths[kept], RUN)
        assert found[name] == pytest.approx(alone[name], rel=1e-12)


@pytest.mark.parametrize("case", ["no norms", "equal rewards", "one response"])
def test_undefined_ratios_are_empty(case: str) -> None:
    rewards, norms, lengths = batch(group=1 if case == "one response" else G)
    if case == "no norms":
        norms = torch.zeros_like(norms)
    if case == "equal rewards":
        rewards = torch.ones_like(rewards)
    assert panel.variance_ratios(rewards, norms, lengths, RUN) == {}


def dependence(name: str, rewards: Tensor, norms: Tensor, lengths: Tensor) -> float:
    values = baseline_values(name, rewards, norms, lengths)
    return panel.self_dependence(name, values, rewards, norms, lengths)


@pytest.mark.parametrize("name", list(FORMULAS))
@pytest.mark.parametrize("measured", [True, False])
def test_self_dependence(name: str, measured: bool) -> None:
    """0 for leave-one-out baselines, else the response's weight in the mean."""
    rewards, norms, lengths = batch(1)
    if not measured:
        norms = torch.zeros_like(norms)
    probe = divmod(int((norms if measured else lengths).argmax()), G)
    wanted = {
        "group_mean": 1 / G,
        "grpo": 1 / G,
        "batch_mean": 1 / (Q * G),
        "reinforce_pp": 1 / (Q * G),
        "opo": float(lengths[probe] / lengths[probe[0]].sum()),
    }
    assert dependence(name, rewards, norms, lengths) == pytest.approx(wanted.get(name, 0.0), abs=1e-12)


def test_a_weighted_mean_that_includes_its_own_response_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theorem 7 without leaving o_i out."""

    def inclusive(rewards: Tensor, norms: Tensor, lengths: Tensor, history: History) -> Tensor:
        return ((norms * rewards).sum(-1, keepdim=True) / norms.sum(-1, keepdim=True)).expand_as(rewards)

    monkeypatch.setitem(BASELINES, "inclusive", Baseline("group", needs_norms=True))
    monkeypatch.setitem(FORMULAS, "inclusive", inclusive)
    rewards, norms, lengths = batch()
    share = (norms / norms.sum(-1, keepdim=True)).flatten()[int(norms.argmax())]
    assert dependence("inclusive", rewards, norms, lengths) == pytest.approx(float(share), rel=1e-9)


def test_spread_is_over_prompts() -> None:
    assert panel.spread(torch.tensor([[0.0, 2.0], [3.0, 3.0]])) == 1.0
