"""Pools of earlier rewards by position in the response, for the baseline `pooled_token`.

    b(k) = N_k / D_k,    N_k = decayed sum of W_{i,t} r_i,    D_k = decayed sum of W_{i,t},    t in bin k

W_{i,t} is the energy of response i up to token t (token_baseline.py). A token's gradient A_{i,t} grad log pi(o_t) has
the least variance near b = E[W_t r] / E[W_t], which changes along a response. Bins grow by powers of two, because W_t
changes by factors early and hardly at all late: bin k holds the tokens 2^k - 1 to 2^(k+1) - 2, counted from 0. So bins
need no setting, and a longer response limit changes none of them.

Each data source has its own pools. A prompt has no history of its own here. Nothing reads the current step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.algo.history import History
from oblr_megatron.algo.token_baseline import NUM_BINS, path_energies, position_bins

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config.algo import AlgoConfig
    from oblr_megatron.types import Prompt, Scored

MOST_LOGGED = 16  # sources


class TokenPools:
    """The sums over earlier steps, the same on every rank; used like `pools.Pools`."""

    def __init__(self, algo: AlgoConfig) -> None:
        self._algo = algo
        self._sources: dict[str, Tensor] = {}  # [2, B] fp64: N, D

    def history(self, prompts: Sequence[Prompt]) -> History:
        """What the steps so far tell about these prompts."""
        if not prompts:
            return History()
        return History(by_position=torch.stack([self._expected(prompt.source) for prompt in prompts]))

    def observe(self, prompts: Sequence[Prompt], scored: Scored, weights: Tensor, history: History) -> None:
        """Add a step.

        Args:
            prompts: Q.
            scored: their rewards and lengths [Q, G].
            weights: energies [N, T] of the response tokens; a response with one that is not finite is left out.
            history: not read.
        """
        known = weights.isfinite().all(-1, keepdim=True)
        path, _ = path_energies(weights.masked_fill(~known, 0.0), scored.lengths)  # [Q, G, T]
        both = torch.stack([(path * scored.rewards.to(torch.float64)[..., None]).sum(1), path.sum(1)], 1)  # [Q, 2, T]
        bins = torch.zeros(len(prompts), 2, NUM_BINS, dtype=torch.float64)
        bins.index_add_(2, position_bins(both.shape[-1]), both)
        for source in dict.fromkeys(prompt.source for prompt in prompts):
            found = bins[[row for row, prompt in enumerate(prompts) if prompt.source == source]].sum(0)
            if found[1].sum() > 0:
                before = self._sources.get(source, torch.zeros_like(found))
                self._sources[source] = self._algo.pool_decay * before + found

    def metrics(self) -> dict[str, float]:
        """The pools' means over all positions, see `means_of`."""
        return means_of({name: sums.sum(-1).tolist() for name, sums in self._sources.items()})

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible; `load_state_dict` restores it to the bit."""
        return {"positions": {name: sums.tolist() for name, sums in self._sources.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. The state of another kind of pools is ignored, and the pools begin empty."""
        kept = state.get("positions", {})
        self._sources = {name: torch.tensor(sums, dtype=torch.float64) for name, sums in kept.items()}

    def _expected(self, source: str) -> Tensor:
        """b [B] of a source; of all sources if it is new; a bin without energy has the mean of all bins."""
        pools = [self._sources[source]] if source in self._sources else list(self._sources.values())
        if not pools:
            return torch.full((NUM_BINS,), torch.nan, dtype=torch.float64)
        sums = torch.stack(pools).sum(0)
        return torch.where(sums[1] > 0, sums[0] / sums[1], _mean(sums))


def means_of(pools: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The metrics pool/<source>/mean of the MOST_LOGGED sources with the largest weights.

    Args:
        pools: N and D of each source. A column `source` may name each row's own.
    """
    largest = sorted(pools, key=lambda name: (-pools[name][1], name))[:MOST_LOGGED]
    return {f"pool/{name or 'data'}/mean": pools[name][0] / pools[name][1] for name in largest}


def _mean(sums: Tensor) -> Tensor:
    return sums[0].sum() / sums[1].sum()
