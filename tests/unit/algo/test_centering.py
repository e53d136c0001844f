"""Centred scores of one prefix: the sampler's mean is 0 for any cap, band and record, and the energy is autograd's.

Not covered: layouts and norms (tests/distributed/test_corrections.py), whole responses (studies/bias.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oblr_megatron.algo.centering import centred_energy, expected_weights

VOCABULARY = 7


def prefix(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of the trainer with a gradient, and the sampler's log-probs [V]; one token cannot be drawn."""
    generator = torch.Generator().manual_seed(seed)
    logits, other = torch.randn(2, VOCABULARY, generator=generator, dtype=torch.float64)
    other[2] = -torch.inf
    return logits.requires_grad_(), other.log_softmax(-1)


@pytest.mark.parametrize("recorded", [1, 3, VOCABULARY])
@pytest.mark.parametrize("band", [None, (0.6, 1.4)])
@pytest.mark.parametrize(("corrects", "cap"), [(True, 1.1), (True, 1e30), (False, 2.0)])
def test_the_samplers_mean_is_zero_and_energies_are_autograds(corrects, cap, band, recorded):
    logits, sampler = prefix(recorded)
    logprobs = logits.log_softmax(-1)
    values, ids = sampler.topk(recorded)
    masses = expected_weights(logprobs.detach()[ids], values, corrects=corrects, cap=cap, band=band)
    mean, used = torch.zeros(VOCABULARY, dtype=torch.float64), 0.0
    for token in range(VOCABULARY):
        ratio = (logprobs[token].detach() - sampler[token]).exp()
        rho = (ratio.clamp(max=cap) if corrects else torch.ones(())).double() * (token in ids)
        if band is not None and not band[0] <= ratio <= band[1]:
            rho = rho * 0
        score = rho * logprobs[token] - (masses * logprobs[ids]).sum()
        (gradient,) = torch.autograd.grad(score, logits, retain_graph=True)
        mean += sampler[token].exp() * gradient
        used += float(sampler[token].exp() * rho)
        energy = 1 - 2 * logprobs[token].exp() + logprobs.exp().square().sum()
        values_of = (energy, logprobs[token], rho, logprobs[ids], masses, ids == token)
        found = centred_energy(*(value.detach()[None] for value in values_of))
        torch.testing.assert_close(found[0], gradient.square().sum(), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-15)
    assert used == pytest.approx(float(masses.sum()), rel=1e-12)


def test_a_broken_model_is_noticed():
    masses = expected_weights(
        torch.tensor([torch.nan, -1.0]), torch.tensor([-1.0, -torch.inf]), corrects=True, cap=2.0, band=(0.5, 2.0)
    )
    assert masses[0].isnan() and masses[1] == 0
