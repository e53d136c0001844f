"""What earlier steps tell about a prompt's best baseline: decayed, norm-weighted means of rewards.

The b with the least variance is E[w r] / E[w] (formulas.py). A group of G responses estimates it badly, because w
varies by factors between responses. Earlier steps have many more responses, and a baseline from them alone is unbiased:

    N_t = rho N_{t-1} + sum_i w_i r_i,    D_t = rho D_{t-1} + sum_i w_i,    pool b_t = N_{t-1} / D_{t-1}

Each data source has a pool. A prompt that comes again has a history of its own with the same sums. Its mean h rests on
n = (sum w)^2 / sum w^2 responses, so it is shrunk towards the pool b:

    b_t = b + tau^2 / (tau^2 + sigma^2 / n) (h - b)
    tau^2 = <w (r - b)(h - b)> / <w>,    sigma^2 = <w (r - b)^2> / <w> - tau^2

tau^2 is the variance of h over prompts as later rewards of the same prompt confirm it, so stale histories lower it.
`optimal_pooled` pulls a group's own estimate x towards b_t with the least-squares weight of earlier steps:

    alpha = <w (r - x)(b_t - x)> / <w (b_t - x)^2>, between 0 and 1

<> are sums over the responses of earlier steps, decayed by rho a step. Nothing reads the current step, so every
baseline from here is exactly unbiased, for any w: exact, measured on some prompts, or a proxy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.algo.history import History
from oblr_megatron.algo.token_pools import TokenPools
from oblr_megatron.algo.weighting import mean_of_others
from oblr_megatron.config.baselines import BASELINES

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config.algo import AlgoConfig
    from oblr_megatron.types import Prompt, Scored


def pools_of(algo: AlgoConfig) -> AnyPools | None:
    """The pools of a run; None if its baseline reads no earlier step."""
    facts = BASELINES[algo.baseline]
    if not facts.pool:
        return None
    return TokenPools(algo) if facts.token_wise else Pools(algo)


class Pools:
    """The sums over earlier steps, the same on every rank.

    Args:
        algo: baseline and pool_decay are read. rho is the weight of the sums so far when a step is added; for a
            prompt, when the prompt comes again.
    """

    def __init__(self, algo: AlgoConfig) -> None:
        self._algo, self._facts = algo, BASELINES[algo.baseline]
        self._sources: dict[str, list[float]] = {}  # N, D
        self._prompts: dict[str, list[float]] = {}  # N, D, sum w^2
        self._spread = [0.0] * 4  # w (r - b)(h - b) and w of prompts with history; w (r - b)^2 and w of all
        self._pull = [0.0, 0.0]  # w (r - x)(b_t - x), w (b_t - x)^2

    def history(self, prompts: Sequence[Prompt]) -> History:
        """What the steps so far tell about these prompts."""
        expected = torch.tensor([self._expected(prompt) for prompt in prompts], dtype=torch.float64)
        above, below = self._pull
        return History(expected, min(1.0, max(0.0, above / below)) if below > 0 else 0.0)

    def observe(self, prompts: Sequence[Prompt], scored: Scored, weights: Tensor, history: History) -> None:
        """Add a step.

        Args:
            prompts: Q.
            scored: their rewards and lengths [Q, G].
            weights: w [Q, G]; a response with w <= 0 or not finite was not measured and is left out.
            history: that of these prompts before the step.
        """
        rewards = scored.rewards.to(torch.float64)
        known = torch.ones_like(rewards) if self._facts.pool == "plain" else weights.to(torch.float64)
        weights = torch.where(known.isfinite() & (known > 0), known, 0.0)
        if self._facts.over == "others" and history.expected is not None:
            self._observe_pull(rewards, weights, mean_of_others(rewards, weights), history.expected)
        self._observe_spread(prompts, rewards, weights)
        sums = torch.stack([weights * rewards, weights, weights**2]).sum(-1).T.tolist()  # [Q, 3]
        by_source: dict[str, list[float]] = {}
        for prompt, found in zip(prompts, sums, strict=True):
            if found[1] > 0:
                total = by_source.setdefault(prompt.source, [0.0, 0.0])
                by_source[prompt.source] = [total[0] + found[0], total[1] + found[1]]
                seen = self._prompts.get(_key(prompt), [0.0] * 3)
                squares = self._algo.pool_decay**2 * seen[2] + found[2]
                self._prompts[_key(prompt)] = [*self._added(seen[:2], found[:2]), squares]
        for source, total in by_source.items():
            self._sources[source] = self._added(self._sources.get(source, [0.0] * 2), total)

    def metrics(self) -> dict[str, float]:
        """The pools' means, tau and alpha, as far as they are defined."""
        found = {f"pool/{name or 'data'}/mean": total / weight for name, (total, weight) in self._sources.items()}
        if self._spread[1] > 0:
            found["pool/prompt_std"] = self._moments()[0] ** 0.5
        if self._pull[1] > 0:
            found["pool/pull"] = self.history(()).pull
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible, and unchanged by later steps; `load_state_dict` restores it to the bit."""
        own = {"sources": dict(self._sources), "prompts": dict(self._prompts)}
        return own | {"spread": self._spread, "pull": self._pull}  # every list is replaced, never changed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. The state of another kind of pools is ignored, and the pools begin empty."""
        if "sources" not in state:
            return
        self._sources, self._prompts = dict(state["sources"]), dict(state["prompts"])
        self._spread, self._pull = list(state["spread"]), list(state["pull"])

    def _pool(self, prompt: Prompt) -> float | None:
        """The mean of the prompt's source; of all sources if its own is new; None in the first step."""
        own = self._sources.get(prompt.source)
        pools = list(self._sources.values()) if own is None else [own]
        weight = sum(weight for _, weight in pools)
        return sum(total for total, _ in pools) / weight if weight > 0 else None

    def _expected(self, prompt: Prompt) -> float:
        pool, seen = self._pool(prompt), self._prompts.get(_key(prompt))
        if pool is None:
            return float("nan")
        between, within = self._moments()
        if seen is None or between <= 0:
            return pool
        mean, responses = seen[0] / seen[1], seen[1] ** 2 / seen[2]
        return pool + between / (between + within / responses) * (mean - pool)

    def _moments(self) -> tuple[float, float]:
        """(tau^2, sigma^2), neither below 0."""
        product, paired, square, weight = self._spread
        between = max(0.0, product / paired) if paired > 0 else 0.0
        return between, max(0.0, square / weight - between) if weight > 0 else 0.0

    def _observe_pull(self, rewards: Tensor, weights: Tensor, own: Tensor, expected: Tensor) -> None:
        away = (expected[:, None] - own).nan_to_num(nan=0.0)  # 0: no pool yet
        found = [float((weights * (rewards - own) * away).sum()), float((weights * away**2).sum())]
        self._pull = self._added(self._pull, found)

    def _observe_spread(self, prompts: Sequence[Prompt], rewards: Tensor, weights: Tensor) -> None:
        found = [0.0] * 4
        for row, prompt in enumerate(prompts):
            pool, seen = self._pool(prompt), self._prompts.get(_key(prompt))
            if pool is None:
                continue
            away, weight = weights[row] * (rewards[row] - pool), float(weights[row].sum())
            if seen is not None:
                found[0] += float(away.sum()) * (seen[0] / seen[1] - pool)
                found[1] += weight
            found[2] += float((away * (rewards[row] - pool)).sum())
            found[3] += weight
        self._spread = self._added(self._spread, found)

    def _added(self, sums: Sequence[float], found: Sequence[float]) -> list[float]:
        return [self._algo.pool_decay * before + new for before, new in zip(sums, found, strict=True)]


def _key(prompt: Prompt) -> str:
    return f"{prompt.source}/{prompt.id}"


AnyPools = Pools | TokenPools
