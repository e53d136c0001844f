"""A prompt's best baseline, as earlier steps tell it: decayed, norm-weighted means of rewards.

The b with the least variance is E[w r] / E[w] (formulas.py). A group of G responses estimates it badly, because w
varies by factors between responses. Earlier steps have many more responses, and a baseline from them alone is unbiased:

    N_t = rho N_{t-1} + sum_i w_i r_i,    D_t = rho D_{t-1} + sum_i w_i,    pool b_t = N_{t-1} / D_{t-1}

Each data source has a pool. A prompt that comes again has a history of its own with the same sums and the mean h. Its
weight grows with D, measured in units of wbar, the mean norm of a response:

    x = D / (D + wbar) (h - b),    b_t = b + beta x,    beta = <w (r - b) x> / <w x^2>, between 0 and 1

beta is the least-squares weight by which earlier histories predicted later rewards. Stale histories lower it, and so do
prompts that are all alike. A right answer with a tiny norm moves b_t by little, although its h is 1.
`optimal_pooled` pulls a group's own estimate x towards b_t with the least-squares weight of earlier steps:

    alpha = <w (r - x)(b_t - x)> / <w (b_t - x)^2>, between 0 and 1

<> are sums over the responses of earlier steps, decayed by rho a step. Nothing reads the current step, so every
baseline from here is exactly unbiased, for any w: exact, measured on some prompts, or a proxy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.algo.formulas import History
from oblr_megatron.algo.weighting import mean_of_others
from oblr_megatron.config.baselines import facts_of

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config.algo import AlgoConfig
    from oblr_megatron.types import Prompt, Scored

MOST_LOGGED = 16  # sources


def pools_of(algo: AlgoConfig) -> Pools | None:
    """The pools of a run; None if its baseline reads no earlier step."""
    return Pools(algo) if facts_of(algo.baseline).pool else None


class Pools:
    """The sums over earlier steps, the same on every rank.

    Args:
        algo: baseline and pool_decay are read. rho is the weight of the sums so far when a step is
            added; for a prompt, when the prompt comes again.
    """

    def __init__(self, algo: AlgoConfig) -> None:
        self._algo, self._facts = algo, facts_of(algo.baseline)
        self._sources: dict[str, list[float]] = {}  # N, D
        self._prompts: dict[str, list[float]] = {}  # N, D
        self._norms = [0.0, 0.0]  # w, number of responses
        self._trust = [0.0, 0.0]  # w (r - b) x, w x^2
        self._effective = 0.0  # (sum w)^2 / sum w^2 of the last step
        self._pull = [0.0, 0.0]  # w (r - x)(b_t - x), w (b_t - x)^2

    def history(self, prompts: Sequence[Prompt]) -> History:
        """The history of these prompts over the steps so far."""
        pools = zip(prompts, self._pools_of(prompts), strict=True)
        expected = torch.tensor([self._expected(prompt, pool) for prompt, pool in pools], dtype=torch.float64)
        return History(expected, least_squares(self._pull))

    def observe(
        self, prompts: Sequence[Prompt], scored: Scored, weights: Tensor, history: History, kept: Tensor | None = None
    ) -> None:
        """Add a step, with the history of its prompts before it.

        Args:
            prompts: Q.
            scored: their rewards [Q, G].
            weights: w [Q, G]. A response with w <= 0 or not finite was not measured and is left out.
            history: of the prompts, before the step.
            kept: [Q, G] how many responses a measured one stands for (`algo.keep`); None: 1.
        """
        rewards = scored.rewards.to(torch.float64)
        known = weights.to(torch.float64) if self._facts.pools_norms else torch.ones_like(rewards)
        counts = (known.isfinite() & (known > 0)).to(torch.float64)
        if kept is not None and self._facts.pools_norms:
            counts *= kept
        weights = torch.where(counts > 0, known * counts, 0.0)
        if self._facts.over == "others" and history.expected is not None:
            own = mean_of_others(rewards, weights)
            away = (history.expected[:, None] - own).nan_to_num(nan=0.0)  # 0: no pool yet
            terms = [float((weights * (rewards - own) * away).sum()), float((weights * away**2).sum())]
            self._pull = self._added(self._pull, terms)
        self._observe_trust(prompts, rewards, weights)
        self._effective = 0.0
        if bool(weights.any()):  # or the mean would be 0 / 0 where older steps do not count
            self._effective = float(weights.sum() ** 2 / weights.square().sum())
            self._norms = self._added(self._norms, [float(weights.sum()), float(counts.sum())])
        sums = torch.stack([weights * rewards, weights]).sum(-1).T.tolist()  # [Q, 2]
        by_source: dict[str, list[float]] = {}
        for prompt, terms in zip(prompts, sums, strict=True):
            if terms[1] > 0:
                total = by_source.get(prompt.source, [0.0, 0.0])
                by_source[prompt.source] = [total[0] + terms[0], total[1] + terms[1]]
                self._prompts[_key(prompt)] = self._added(self._prompts.get(_key(prompt), [0.0] * 2), terms)
        for source, total in by_source.items():
            self._sources[source] = self._added(self._sources.get(source, [0.0] * 2), total)

    def metrics(self) -> dict[str, float]:
        """The pools' means (see `means_of`), the last step's effective responses, beta and alpha."""
        metrics = means_of(self._sources)
        if self._effective and self._facts.pools_norms:
            metrics["pool/effective_samples"] = self._effective
        if self._trust[1] > 0:
            metrics["pool/trust"] = least_squares(self._trust)
        if self._pull[1] > 0:
            metrics["pool/pull"] = least_squares(self._pull)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible, and unchanged by later steps; `load_state_dict` restores it to the bit."""
        # Every list is replaced, never changed
        own = {"sources": dict(self._sources), "prompts": dict(self._prompts), "weights": self._facts.pool}
        return own | {"norms": self._norms, "trust": self._trust, "pull": self._pull}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. The state of another kind of pools is ignored, and the pools begin empty."""
        if state.get("weights") != self._facts.pool:  # sums of other weights have another unit
            return
        self._sources, self._prompts = dict(state["sources"]), dict(state["prompts"])
        self._norms, self._trust, self._pull = (list(state[name]) for name in ("norms", "trust", "pull"))

    def _pools_of(self, prompts: Sequence[Prompt]) -> list[float | None]:
        """The mean of each prompt's source; of all sources if its own is new; None in the first step."""
        new = any(prompt.source not in self._sources for prompt in prompts)  # each row may have a source of its own
        whole = [math.fsum(column) for column in zip(*self._sources.values(), strict=True)] if new else []
        sums = [self._sources.get(prompt.source, whole) for prompt in prompts]
        return [own[0] / own[1] if own and own[1] > 0 else None for own in sums]

    def _expected(self, prompt: Prompt, pool: float | None) -> float:
        return float("nan") if pool is None else pool + least_squares(self._trust) * self._away(prompt, pool)

    def _away(self, prompt: Prompt, pool: float) -> float:
        """x of a prompt; 0 without a history."""
        total, weight = self._prompts.get(_key(prompt), (0.0, 0.0))
        return (total - weight * pool) / (weight + self._norms[0] / self._norms[1]) if weight > 0 else 0.0

    def _observe_trust(self, prompts: Sequence[Prompt], rewards: Tensor, weights: Tensor) -> None:
        terms = [0.0, 0.0]
        for row, (prompt, pool) in enumerate(zip(prompts, self._pools_of(prompts), strict=True)):
            if pool is not None and (away := self._away(prompt, pool)):
                terms[0] += float((weights[row] * (rewards[row] - pool)).sum()) * away
                terms[1] += float(weights[row].sum()) * away**2
        self._trust = self._added(self._trust, terms)

    def _added(self, sums: Sequence[float], terms: Sequence[float]) -> list[float]:
        """Sums after a step: the older ones decay."""
        return [self._algo.pool_decay * before + new for before, new in zip(sums, terms, strict=True)]


def least_squares(sums: Sequence[float]) -> float:
    """above / below, between 0 and 1; 0 while nothing is known."""
    above, below = sums
    return min(1.0, max(0.0, above / below)) if below > 0 else 0.0


def _key(prompt: Prompt) -> str:
    return f"{prompt.source}/{prompt.id}"


def means_of(pools: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The metrics pool/<source>/mean of the first MOST_LOGGED sources by name, from N and D of each.

    A column `source` of the data may name each row's own. The largest would be others in each step, and each name is a
    chart of the report and the trackers.
    """
    return {f"pool/{name or 'data'}/mean": pools[name][0] / pools[name][1] for name in sorted(pools)[:MOST_LOGGED]}
