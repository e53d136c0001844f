"""`oblr-megatron study bias`: the mean score and the gradient under truncated sampling and cut weights, by enumeration.

The policy pi writes responses of two tokens from a vocabulary of six. The sampler mu is another policy, as after an
update or a rounding, that draws through a filter. All responses are enumerated in fp64. Weights are the package's own:

    drift   ||E_mu[s]|| / sqrt(E_mu ||s||^2), s = sum_t s_t the weighted score: 0 if baselines are to add no bias
    error   ||E_mu[(r - b) s] - grad J|| / ||grad J||, J the mean reward of what is scored, b that under mu

"replay" scores pi over the tokens that the filter let through, at each prefix. "centre" subtracts the sampler's
expectation (`algo/centering.py`) over all tokens that can be drawn. Ratios of single tokens leave an error without any
cut, because prefixes and continuations come from mu.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from oblr_megatron.algo.centering import expected_weights
from oblr_megatron.algo.importance import truncated_ratios
from oblr_megatron.algo.rejection import kept_tokens
from oblr_megatron.errors import EXIT_OK

VOCABULARY, FEATURES, MISMATCH = 6, 5, 0.3
CAP, BAND = 1.2, (0.7, 1.5)

FILTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda probs: torch.ones_like(probs, dtype=torch.bool),
    "top_p 0.8": lambda probs: _nucleus(probs, 0.8),
    "top_k 3": lambda probs: probs >= probs.sort(descending=True).values[..., 2:3],
    "min_p 0.2": lambda probs: probs >= 0.2 * probs.amax(-1, keepdim=True),
}
"""Filter -> a function of the sampler's probabilities [.., V] to the tokens that can be drawn."""
WEIGHTS = ("none", "cap", "token rejection")
"""Cuts of the weights pi / mu."""


@dataclass(frozen=True, slots=True)
class Row:
    """One case. Example: Row("top_p 0.8", "cap", replay=True, centre=False, drift=0.03, error=0.1)"""

    filter: str
    weights: str
    replay: bool
    centre: bool
    drift: float
    error: float


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The fewest most likely tokens with at least top_p of the probability."""
    ordered, places = probs.sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probs, dtype=torch.bool).scatter(-1, places, before < top_p)


@dataclass(frozen=True, slots=True)
class Toy:
    """Logits at a prefix are features[prefix] @ theta; prefixes are the empty one and those of one token."""

    features: Tensor  # [1 + V, V, D]
    theta: Tensor  # [D]
    other: Tensor  # [D], the sampler's
    rewards: Tensor  # [V, V]

    @classmethod
    def drawn(cls, seed: int = 0) -> Toy:
        """A policy and a sampler at random."""
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        features, theta = normal(1 + VOCABULARY, VOCABULARY, FEATURES), normal(FEATURES)
        return cls(features, theta, theta + MISMATCH * normal(FEATURES), normal(VOCABULARY, VOCABULARY))

    def row(self, filtered: str, weights: str, *, replay: bool, centre: bool) -> Row:
        """One case, enumerated."""
        base = (self.features @ self.other).softmax(-1)
        support = FILTERS[filtered](base)  # [1 + V, V]
        sampler = base.masked_fill(~support, 0.0)
        sampler = (sampler / sampler.sum(-1, keepdim=True)).log()
        scored = support if replay else torch.ones_like(support)
        theta = self.theta.clone().requires_grad_()
        logprobs = (self.features @ theta).masked_fill(~scored, -torch.inf).log_softmax(-1)
        scores = self._token_scores(theta, logprobs, scored)  # [1 + V, V, D], grad log pi of each token
        rho = self._weights(logprobs.detach(), sampler, weights)
        own = rho[..., None] * scores
        if centre:
            cap, band = CAP if weights == "cap" else 1e30, BAND if weights == "token rejection" else None
            masses = expected_weights(logprobs.detach(), sampler, corrects=True, cap=cap, band=band)
            own = own - (masses[..., None] * scores).sum(1, keepdim=True)
        chance = sampler[0].exp()[:, None] * sampler[1:].exp()  # [V, V] of the two tokens
        whole = own[0][:, None] + own[1:]  # [V, V, D], s of each response
        mean, square = torch.einsum("ab,abd->d", chance, whole), (chance * whole.square().sum(-1)).sum()
        objective = ((logprobs[0][:, None] + logprobs[1:]).exp() * self.rewards).sum()
        (wanted,) = torch.autograd.grad(objective, theta)
        centred = self.rewards - (chance * self.rewards).sum()
        error = torch.einsum("ab,ab,abd->d", chance, centred, whole) - wanted
        drift = mean.norm() / square.sqrt() if square else square  # 0 if everything is rejected
        return Row(filtered, weights, replay, centre, float(drift), float(error.norm() / wanted.norm()))

    def _token_scores(self, theta: Tensor, logprobs: Tensor, scored: Tensor) -> Tensor:
        """grad log pi of each token [1 + V, V, D]; 0 of tokens that pi excludes."""
        rows = [
            torch.autograd.grad(value, theta, retain_graph=True)[0] if possible else torch.zeros_like(theta)
            for value, possible in zip(logprobs.flatten(), scored.flatten(), strict=True)
        ]
        return torch.stack(rows).view(*logprobs.shape, -1)

    def _weights(self, logprobs: Tensor, sampler: Tensor, weights: str) -> Tensor:
        """rho of each token [1 + V, V], by the package's functions; tokens that cannot be drawn have any."""
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        rho, _ = truncated_ratios(logprobs, sampler, mask, level="token", cap=CAP if weights == "cap" else 1e30)
        if weights == "token rejection":
            keep, _, _ = kept_tokens(logprobs, sampler, mask, level="token", low=BAND[0], high=BAND[1])
            rho = rho.masked_fill(~keep, 0.0)
        return rho.masked_fill(sampler == -torch.inf, 0.0)


def table(seed: int = 0) -> list[Row]:
    """All cases."""
    toy = Toy.drawn(seed)
    return [
        toy.row(filtered, weights, replay=replay, centre=centre)
        for filtered in FILTERS
        for weights in WEIGHTS
        for replay in (False, True)
        for centre in (False, True)
    ]


def lines(rows: list[Row]) -> list[str]:
    """The table as Markdown: drift / error under neither option, each, and both."""
    out = ["| filter | weights | neither | replay | centre | both |", "|---|---|---|---|---|---|"]
    for start in range(0, len(rows), 4):
        neither, centre, replay, both = rows[start : start + 4]
        cells = [f"{row.drift:.0e} / {row.error:.0e}" for row in (neither, replay, centre, both)]
        out.append(f"| {neither.filter} | {neither.weights} | {' | '.join(cells)} |")
    return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the table to DIR/bias.md")
    parser.add_argument("--seed", type=int, default=0, help="of the policy, the sampler and the rewards")
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    rows = "\n".join(lines(table(options.seed)))
    print(f"drift / error; cap {CAP:g}, band {BAND[0]:g} to {BAND[1]:g}\n{rows}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "bias.md").write_text(rows + "\n", encoding="utf-8")
    return EXIT_OK
