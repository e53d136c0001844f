"""The baselines' formulas, invariants and degenerate cases.

Not covered: unbiasedness and variance (test_unbiased.py).
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from oblr_megatron.algo.baseline import (
    STD_EPS,
    active_groups,
    advantages,
    baseline_values,
    sanitize_norms,
    variance_ratio_vs_rloo,
)
from oblr_megatron.algo.formulas import FORMULAS
from oblr_megatron.config.baselines import BASELINES
from oblr_megatron.errors import UserError

LEAVE_ONE_OUT = [name for name, facts in BASELINES.items() if facts.over == "others"]
ZERO_ON_EQUAL = [name for name in BASELINES if BASELINES[name].zero_on_equal]
OF_BATCH = ["batch_mean", "reinforce_pp"]
POOLED = [name for name, facts in BASELINES.items() if facts.pool]
WITHIN_GROUP = [name for name in BASELINES if name not in (*OF_BATCH, *POOLED)]
NAN, INF = math.nan, math.inf


def tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@st.composite
def batches(draw, min_group: int = 2):
    """(rewards, norms, lengths), each [Q, G]; Q >= 2, zero norms and zero lengths included."""
    shape = (draw(st.integers(2, 4)), draw(st.integers(min_group, 6)))
    reward = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-5, 5))
    norm = st.one_of(st.just(0.0), st.floats(1e-2, 1e3))
    columns = (arrays(float, shape, elements=reward), arrays(float, shape, elements=norm))
    lengths = arrays(float, shape, elements=st.integers(0, 20).map(float))
    return tuple(torch.from_numpy(draw(column)) for column in (*columns, lengths))


def test_every_baseline_of_the_config_has_facts_and_a_formula():
    assert set(FORMULAS) == set(BASELINES)


def test_each_formula_on_a_worked_group():
    rewards, norms, lengths = tensor([1, 0, 3], [2, 2, 5]), tensor([1, 2, 3], [1, 1, 2]), tensor([2, 4, 6], [1, 1, 1])
    b = {name: baseline_values(name, rewards, norms, lengths)[0].tolist() for name in BASELINES}
    assert b["none"] == [0, 0, 0]
    assert b["group_mean"] == b["grpo"] == pytest.approx([4 / 3] * 3, rel=1e-14)
    assert b["batch_mean"] == b["reinforce_pp"] == pytest.approx([13 / 6] * 3, rel=1e-14)
    assert b["rloo"] == pytest.approx([3 / 2, 2, 1 / 2], rel=1e-14)
    assert b["opo"] == pytest.approx([20 / 12] * 3, rel=1e-14)
    assert b["optimal"] == pytest.approx([9 / 5, 10 / 4, 1 / 3], rel=1e-14)


def test_grpo_divides_by_the_sample_standard_deviation():
    rewards = tensor([1, 0, 0, 1])
    got = advantages("grpo", rewards, torch.ones_like(rewards), torch.ones_like(rewards))
    assert got[0].tolist() == pytest.approx([x / (math.sqrt(1 / 3) + STD_EPS) for x in (0.5, -0.5, -0.5, 0.5)])


def test_reinforce_pp_divides_by_the_standard_deviation_of_the_batch():
    rewards = tensor([1, 0], [0, 0])
    got = advantages("reinforce_pp", rewards, torch.ones_like(rewards), torch.ones_like(rewards))
    assert got.flatten().tolist() == pytest.approx([x / (0.5 + STD_EPS) for x in (0.75, -0.25, -0.25, -0.25)])


@given(batches(min_group=3))
def test_optimal_is_the_closed_form_where_that_is_well_conditioned(batch):
    rewards, norms, lengths = batch
    norms = norms + 1
    s0, s1 = norms.sum(-1, keepdim=True), (norms * rewards).sum(-1, keepdim=True)
    want = (rewards * s0 - s1) / (s0 - norms)
    torch.testing.assert_close(advantages("optimal", rewards, norms, lengths), want, rtol=1e-9, atol=1e-9)


@given(batches(), st.sampled_from(LEAVE_ONE_OUT))
def test_leave_one_out_stays_between_the_others_rewards(batch, name):
    rewards, _, _ = batch
    b = baseline_values(name, *batch)
    for q, i in ((q, i) for q in range(rewards.shape[0]) for i in range(rewards.shape[1])):
        others = torch.cat((rewards[q, :i], rewards[q, i + 1 :]))
        assert others.min() <= b[q, i] <= others.max()


@given(
    batches(), st.sampled_from(LEAVE_ONE_OUT), st.floats(-9, 9), st.sampled_from([0.0, 7.0, 1e15]), st.integers(0, 9)
)
def test_a_baseline_is_independent_of_its_own_sample(batch, name, reward, norm, length):
    before = baseline_values(name, *batch)[-1, 1]
    for values, own in zip(batch, (reward, norm, float(length)), strict=True):
        values[-1, 1] = own
    assert baseline_values(name, *batch)[-1, 1] == before  # to the last bit


@given(batches(), st.sampled_from(list(BASELINES)), st.randoms(use_true_random=False))
def test_permuting_a_group_permutes_its_advantages(batch, name, random):
    order = list(range(batch[0].shape[1]))
    random.shuffle(order)
    permuted = advantages(name, *(values[:, order] for values in batch))
    torch.testing.assert_close(permuted, advantages(name, *batch)[:, order], rtol=1e-9, atol=1e-9)


@given(batches(), st.floats(-5, 5))
def test_a_batch_of_equal_rewards_gives_exactly_zero(batch, reward):
    _, norms, lengths = batch
    rewards = torch.full_like(norms, reward)
    for name in (*ZERO_ON_EQUAL, *OF_BATCH):
        assert (advantages(name, rewards, norms, lengths) == 0).all(), name
        assert not active_groups(name, rewards).any() or name in OF_BATCH


@given(batches(), st.sampled_from(WITHIN_GROUP))
def test_groups_without_a_prior_are_independent(batch, name):
    rewards, norms, lengths = batch
    norms = norms + 1  # avoid the TINY_WEIGHT guard, which reads the whole batch
    whole = advantages(name, rewards, norms, lengths)
    single = advantages(name, rewards[:1], norms[:1], lengths[:1])
    torch.testing.assert_close(whole[:1], single, rtol=1e-12, atol=1e-12)


def test_rounding_leaves_equal_rewards_at_zero_and_bounds_in_place():
    """Ten thousand random groups with rewards that are not exact in binary."""
    random = torch.Generator().manual_seed(0)
    norms, rewards = (torch.rand(10_000, 5, generator=random, dtype=torch.float64) for _ in range(2))
    equal = rewards[:, :1].expand(-1, 5)
    for name in ZERO_ON_EQUAL:
        assert (advantages(name, equal, norms, norms) == 0).all(), name
    bounded = torch.where(rewards > 0.5, 0.7, rewards)  # several at the maximum, and some of no weight
    weights = norms * (rewards > 0.2)
    for name in ("rloo", "optimal", "group_mean", "opo"):
        b = baseline_values(name, bounded, weights, weights)
        assert (b <= bounded.amax(-1, keepdim=True)).all(), name
        assert (b >= bounded.amin(-1, keepdim=True)).all(), name


def test_others_without_weight_give_their_plain_mean():
    rewards, lengths = tensor([1, 2, 3, 7], [0, 1, 0, 1]), tensor([9, 0, 0, 0], [5, 5, 5, 5])
    for weights in (lengths, lengths.clamp(min=1e-9)):
        b = baseline_values("optimal", rewards, weights, lengths)[0]
        assert b.tolist() == pytest.approx([4, 1, 1, 1], rel=1e-8)


def test_a_group_without_any_weight_falls_back_to_rloo():
    rewards, norms = tensor([1, 2, 6], [0, 1, 0]), tensor([0, 0, 0], [1, 2, 3])
    b = baseline_values("optimal", rewards, norms, norms)[0]
    assert b.tolist() == [4, 3.5, 1.5]
    assert baseline_values("opo", rewards, norms, norms)[0].tolist() == pytest.approx([3, 3, 3])


def test_a_dominant_norm_costs_no_digits():
    """The closed form S0 - w_i would lose all digits of the others' weights here."""
    rewards, norms = tensor([1, 2, 6, 0], [0, 1, 0, 1]), tensor([1e20, 1, 3, 4], [1e20, 1e20, 1e20, 1e20])
    b = baseline_values("optimal", rewards[:1], norms[:1], norms[:1])[0]
    assert b.tolist() == pytest.approx([20 / 8, 1, 1, 1], rel=1e-15)
    assert baseline_values("optimal", rewards, norms, norms)[0, 0] == pytest.approx(
        8 / 3
    )  # plain mean: the others' weights are negligible in the batch


def test_invalid_norms_are_replaced_by_the_median():
    norms = tensor([1, 30, NAN, 2], [INF, NAN, -1, INF], [5, 5, 6, 7])
    clean = sanitize_norms(norms)
    assert clean[0].tolist() == [1, 30, 2, 2]
    assert clean[1].tolist() == [5] * 4  # the batch's median of 1 2 5 5 6 7 30 is 5
    assert clean[2].tolist() == [5, 5, 6, 7]
    assert sanitize_norms(torch.full((2, 2), NAN)).tolist() == [[1, 1], [1, 1]]
    valid = tensor([0, 1e30, 1e-30])
    assert sanitize_norms(valid).equal(valid)


def test_invalid_norms_give_finite_advantages():
    rewards = tensor([1, 0, 0, 1], [0, 1, 0, 0])
    norms = tensor([INF, 1, 2, 3], [NAN, NAN, NAN, NAN])
    got = advantages("optimal", rewards, norms, norms.nan_to_num(1))
    want = advantages("optimal", rewards, tensor([2, 1, 2, 3], [2, 2, 2, 2]), torch.ones_like(norms))
    assert got.equal(want)


@pytest.mark.parametrize("name", [name for name in BASELINES if BASELINES[name].over in ("others", "group")])
def test_a_group_of_one_is_refused_by_baselines_of_the_group(name):
    one = torch.ones(3, 1)
    with pytest.raises(UserError) as error:
        advantages(name, one, one, one)
    assert error.value.where == "group_size" and name in str(error.value)


def test_a_batch_of_one_response_has_zero_advantage():
    one = tensor([0.3])
    assert advantages("reinforce_pp", one, one, one).item() == 0


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(UserError) as error:
        advantages("rloo", tensor([0, NAN]), tensor([1, 1]), tensor([1, 1]))
    assert error.value.where == "reward"


def test_active_groups_have_mixed_rewards_unless_the_baseline_looks_beyond_the_group():
    rewards = tensor([0, 0], [0, 1], [1, 1])
    for name in ZERO_ON_EQUAL:
        assert active_groups(name, rewards).tolist() == [False, True, False], name
    for name in ("none", "pooled", *OF_BATCH):
        assert active_groups(name, rewards).tolist() == [True] * 3, name


def test_variance_ratio_on_a_worked_batch():
    rewards, norms = tensor([1, 0, 0]), tensor([1, 2, 4])
    b_rloo, b_optimal = [0, 0.5, 0.5], [0, 1 / 5, 1 / 3]
    rloo, optimal = ((1 + 2 * b[1] ** 2 + 4 * b[2] ** 2) for b in (b_rloo, b_optimal))
    got = variance_ratio_vs_rloo(rewards, norms, tensor(b_optimal))
    assert got == pytest.approx(optimal / rloo, rel=1e-14)
    assert variance_ratio_vs_rloo(rewards, norms, tensor(b_rloo)) == 1.0
    assert math.isnan(variance_ratio_vs_rloo(tensor([1, 1]), tensor([1, 2]), tensor([1, 1])))
    assert math.isnan(variance_ratio_vs_rloo(tensor([1]), tensor([1]), tensor([0])))
