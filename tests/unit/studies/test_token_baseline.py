"""The token-wise baseline against its formula, and the ends of responses.

Not covered: energies from a model, and the gradient (test_estimator.py).
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from studies.token_baseline import otb
from tests.unit.algo.conftest import make_toy


@st.composite
def groups(draw):
    """(rewards [Q, G], energies [N, T], lengths [Q, G]), including empty responses and energies <= 0."""
    prompts, size, longest = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rewards = arrays(float, (prompts, size), elements=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-5, 5)))
    energy = st.one_of(st.just(0.0), st.floats(1e-3, 2), st.just(-1e-17))
    energies = arrays(float, (prompts * size, longest), elements=energy)
    lengths = arrays(int, (prompts, size), elements=st.integers(0, longest))
    return tuple(torch.from_numpy(draw(column)) for column in (rewards, energies, lengths))


def by_the_formula(rewards: Tensor, energies: Tensor, lengths: Tensor) -> Tensor:
    size, found = rewards.shape[1], torch.zeros_like(energies)
    for n in range(len(energies)):
        q = n // size
        for t in range(int(lengths[q, n % size])):
            left = [j for j in range(size) if lengths[q, j] > t]
            weights = {j: sum(max(float(energies[q * size + j, k]), 0.0) for k in range(t + 1)) for j in left}
            if not any(weights.values()):
                weights = dict.fromkeys(left, 1.0)
            mean = sum(weights[j] * float(rewards[q, j]) for j in left) / sum(weights.values())
            found[n, t] = rewards[q, n % size] - mean
    return found


def test_a_worked_group():
    rewards, energies = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 9.0], [3.0, 3.0]])
    found = otb(rewards, energies, torch.tensor([[1, 2]]))
    torch.testing.assert_close(found, torch.tensor([[0.75, 0], [-0.25, 0]], dtype=torch.float64), rtol=1e-15, atol=0)


@given(groups())
def test_it_is_the_formula(group):
    torch.testing.assert_close(otb(*group), by_the_formula(*group), rtol=1e-12, atol=1e-12)


@given(groups(), st.floats(-5, 5))
def test_equal_rewards_give_exactly_zero(group, reward):
    rewards, energies, lengths = group
    assert (otb(torch.full_like(rewards, reward), energies, lengths) == 0).all()


@given(groups())
def test_values_past_the_end_are_not_read(group):
    rewards, energies, lengths = group
    past = torch.arange(energies.shape[1]) >= lengths.flatten()[:, None]
    assert otb(rewards, energies.masked_fill(past, torch.nan), lengths).equal(otb(*group))
    assert (otb(*group)[past] == 0).all()


@given(groups())
def test_the_last_response_left_has_zero_advantage(group):
    _, energies, lengths = group
    left = torch.arange(energies.shape[1]) < lengths[..., None]
    alone = (left & (left.sum(1, keepdim=True) == 1)).flatten(0, 1)
    assert (otb(*group)[alone] == 0).all()


def test_including_its_own_reward_biases_the_gradients_direction():
    """Exact, over all groups of two. The group mean biases only the scale."""
    toy = make_toy(seed=0)
    picks, probs = toy.groups(0, 2)
    steps = toy.token_scores[0][picks]  # [E, G, T, D]
    lengths, rewards = toy.lengths[0][picks].long(), toy.rewards[0][picks]
    energies = steps.square().sum(-1).flatten(0, 1)
    advantage = otb(rewards, energies, lengths).view(*lengths.shape, -1)
    got = torch.einsum("e,egt,egtd->d", probs, advantage, steps) / 2
    equal = otb(rewards, torch.ones_like(energies), torch.full_like(lengths, 3)).view_as(advantage)
    mean = torch.einsum("e,egt,egtd->d", probs, equal, steps) / 2
    torch.testing.assert_close(mean, toy.gradients[0] / 2, rtol=0, atol=1e-12)
    assert torch.cosine_similarity(got, toy.gradients[0], dim=0) < 1 - 1e-4
