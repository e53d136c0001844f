"""Thinning: unbiased over all sets of kept responses, within the budget of tokens, with less noise than uniform draws.

Not covered: the passes over the responses that are kept (tests/distributed/test_gradnorm_modes.py).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.algo.thinning import UNIFORM, inclusion, sampled_energies, thinned
from tests.unit.algo.test_advantage import EARLIER, config_of, step


def sets_of(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Every set of kept responses [E, N], and the sets' probabilities [E]."""
    kept = torch.tensor(list(itertools.product([0.0, 1.0], repeat=probabilities.numel())), dtype=torch.float64)
    return kept, torch.where(kept > 0, probabilities, 1 - probabilities).prod(-1)


@pytest.mark.parametrize("baseline", ["none", "rloo", "pooled", "grpo"])
@pytest.mark.parametrize("keep", [0.25, 0.5, 0.9])
def test_the_mean_over_all_sets_is_the_whole_gradient(baseline: str, keep: float) -> None:
    """Four responses of a prompt with scores of three numbers, under the rule of a run."""
    scored, norms = step()
    rule, scores = AdvantageRule(scored, config_of(baseline=baseline), EARLIER), torch.randn(4, 3, dtype=torch.float64)
    whole = rule([1], norms[[1]])[0]
    energies = norms[1] * torch.tensor([0.1, 3.0, 1.0, 0.5], dtype=torch.float64)  # any, also a bad proxy
    pi = inclusion((whole.abs() * energies.sqrt())[None], scored.lengths[[1]], keep)[0]
    total = torch.zeros(3, dtype=torch.float64)
    kept, chances = sets_of(pi)
    for mask, chance in zip(kept, chances, strict=True):
        weights = torch.ones_like(norms)
        weights[1] = mask / pi
        total += chance * (rule.thinned(weights)([1], norms[[1]])[0] @ scores)
    assert float(chances.sum()) == pytest.approx(1)
    torch.testing.assert_close(total, whole @ scores, rtol=1e-12, atol=1e-15)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 4096)), min_size=1, max_size=30),
    st.floats(0.01, 1, exclude_min=True),
)
def test_the_mean_share_of_the_tokens_is_the_budget(responses: list[tuple[float, int]], keep: float) -> None:
    values, tokens = (torch.tensor([column], dtype=torch.float64) for column in zip(*responses, strict=True))
    pi = inclusion(values, tokens, keep)
    assert float((pi * tokens).sum()) == pytest.approx(keep * float(tokens.sum()), rel=1e-9)
    assert float(pi.min()) >= UNIFORM * keep * (1 - 1e-9) and float(pi.max()) <= 1 + 1e-9


def test_responses_are_drawn_with_their_probability() -> None:
    """4,000 seeds; five standard errors."""
    coefficients, energies = torch.tensor([[3.0, -1.0], [0.0, 0.2]]).double(), torch.tensor([[1.0, 4.0], [1.0, 0.0]])
    tokens = torch.tensor([[10, 20], [5, 5]])
    weights = torch.stack([thinned(coefficients, energies.double(), tokens, 0.5, seed) for seed in range(4000)])
    pi = inclusion(coefficients.abs() * (energies / tokens).sqrt(), tokens, 0.5)
    assert bool(((weights == 0) | torch.isclose(weights, 1 / pi)).all())
    assert bool(((weights.mean(0) - 1).abs() <= 5 * ((1 / pi - 1) / 4000).sqrt() + 1e-12).all())


def test_half_of_the_tokens_cost_less_noise_than_at_random() -> None:
    """Norms with a heavy tail, as measured: the extra noise sum (1 / pi - 1) c^2 w is a fifth of that of pi = 1/2."""
    generator = torch.Generator().manual_seed(0)
    norms = torch.randn(64, 1, generator=generator, dtype=torch.float64).mul(1.5).exp()
    centred = torch.randn(64, 1, generator=generator, dtype=torch.float64)
    tokens = torch.full((64, 1), 100)
    pi = inclusion(centred.abs() * norms.sqrt(), tokens, 0.5)
    energy = centred.square() * norms
    assert float(((1 / pi - 1) * energy).sum()) < 0.2 * float(energy.sum())


def test_tokens_that_the_policy_is_sure_of_have_no_energy() -> None:
    found = sampled_energies([(0.0, 0.0), (torch.tensor(0.5).log().item(), 0.0), ()])
    assert found.tolist() == pytest.approx([0.0, 0.25, 0.0])
