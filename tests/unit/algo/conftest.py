"""A policy so small that tests enumerate all its groups: expectations are exact sums.

A response is a run of "continue" decisions that ends with "stop" or the third decision: 0, 10, 110, 111, of lengths 1,
2, 3, 3. Each decision is a softmax over two logits, linear in one parameter vector that all prompts share.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

RESPONSES = ((0,), (1, 0), (1, 1, 0), (1, 1, 1))
NUM_PARAMETERS = 5


@dataclass(frozen=True)
class Toy:
    """P prompts, K responses each, D parameters; everything fp64 and exact."""

    probs: Tensor  # [P, K]
    scores: Tensor  # [P, K, D] gradient of log pi
    rewards: Tensor  # [P, K]
    lengths: Tensor  # [P, K]
    token_scores: Tensor  # [P, K, T, D] of each decision, 0 past the end
    gradients: Tensor  # [P, D] of each prompt's expected reward, by autograd through the probabilities

    @property
    def norms_sq(self) -> Tensor:
        """[P, K] exact w."""
        return self.scores.square().sum(-1)

    def groups(self, prompt: int, size: int, *, ordered: bool = True) -> tuple[Tensor, Tensor]:
        """Every group of `size` responses to a prompt: their indices [E, G] and probabilities [E].

        Not `ordered`: one group stands for those that differ by their order (test_baseline.py permutes groups).
        """
        picks = torch.cartesian_prod(*[torch.arange(len(RESPONSES))] * size).reshape(-1, size)
        counts = torch.ones(len(picks))
        if not ordered:
            picks, counts = picks.sort(-1).values.unique(dim=0, return_counts=True)
        return picks, counts * self.probs[prompt][picks].prod(-1)


def make_toy(seed: int, num_prompts: int = 2, spread: float = 1.0, rewards: Tensor | None = None) -> Toy:
    """A toy with random features of standard deviation `spread` and, unless given, random rewards [P, K]."""
    random = torch.Generator().manual_seed(seed)
    shape = (num_prompts, 3, 2, NUM_PARAMETERS)
    features = spread * torch.randn(shape, generator=random, dtype=torch.float64)
    theta = torch.randn(NUM_PARAMETERS, generator=random, dtype=torch.float64, requires_grad=True)
    if rewards is None:
        rewards = torch.randn(num_prompts, len(RESPONSES), generator=random, dtype=torch.float64)
    logprobs = torch.stack(
        [
            torch.stack([sum((features[p, t] @ theta).log_softmax(-1)[a] for t, a in enumerate(r)) for r in RESPONSES])
            for p in range(num_prompts)
        ]
    )
    decisions = torch.zeros(num_prompts, len(RESPONSES), 3, NUM_PARAMETERS, dtype=torch.float64)
    for p, k, t in ((p, k, t) for p in range(num_prompts) for k, r in enumerate(RESPONSES) for t in range(len(r))):
        chosen = (features[p, t] @ theta).log_softmax(-1)[RESPONSES[k][t]]
        (decisions[p, k, t],) = torch.autograd.grad(chosen, theta)
    grad = [torch.autograd.grad(x, theta, retain_graph=True)[0] for x in logprobs.flatten()]
    value = (logprobs.exp() * rewards).sum(-1)  # [P]
    lengths = torch.tensor([[len(r) for r in RESPONSES]], dtype=torch.float64).expand_as(rewards)
    return Toy(
        probs=logprobs.exp().detach(),
        scores=torch.stack(grad).view(num_prompts, len(RESPONSES), -1),
        rewards=rewards,
        lengths=lengths,
        token_scores=decisions,
        gradients=torch.stack([torch.autograd.grad(x, theta, retain_graph=True)[0] for x in value]),
    )


@pytest.fixture(scope="session")
def toy() -> Toy:
    """A toy of two prompts with random features and rewards."""
    return make_toy(seed=0)
