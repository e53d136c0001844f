"""The advantage rule of a step: from squared gradient norms w to the coefficients c of the policy gradient.

    A_i = (wbar / w_i)^gamma (r_i - b_i(w)) / divisor,    c_i = A_i times the constant of algo.aggregation

gamma is `algo.norm_power`.

One-pass modes know the norms of one prompt at a time, so the rule is a callable: it takes the norms of some prompts and
returns their coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from oblr_megatron.algo.baseline import active_groups, advantages
from oblr_megatron.algo.formulas import NO_HISTORY, History
from oblr_megatron.algo.loss import sample_coefficients
from oblr_megatron.algo.weighting import tempering
from oblr_megatron.config.baselines import facts_of

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.types import Scored


class AdvantageRule:
    """Coefficients c of the prompts of one step, or of some of them (`rollout.overlap`).

    A sample with a norm that is not finite gets c = 0. Its gradient is not finite either, and one bad sample must not
    end a run.

    Args:
        scored: rewards and lengths of these prompts.
        config: baseline, norm_power and aggregation are read.
        history: what earlier steps tell about the step's prompts. Its mean norm is wbar, and the norm of the prompts
            that a call leaves out. A baseline reads it only to decide whether a group's norms are negligible.
        own: the prompts of a mini-batch, see `of_update`; None: all.
        weights: [k, G] of all coefficients, see `thinned`; None: 1.
    """

    def __init__(
        self,
        scored: Scored,
        config: Config,
        history: History = NO_HISTORY,
        own: Sequence[int] | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self._scored, self._config, self._history = scored, config, history
        self._own = list(range(len(scored.rewards)) if own is None else own)
        self._weights = torch.ones_like(scored.rewards) if weights is None else weights

    def of_update(self, own: Sequence[int]) -> AdvantageRule:
        """The rule of an update on some of the prompts (`algo.updates_per_batch`), which counts them from 0.

        Baselines read the whole batch; divisors count only the update's own prompts.
        """
        return AdvantageRule(self._scored, self._config.per_update, self._history, own)

    def thinned(self, weights: Tensor) -> AdvantageRule:
        """The rule for a gradient of some responses (`algo.keep`): weights [k, G], 0 for those that are left out."""
        return AdvantageRule(self._scored, self._config, self._history, self._own, weights)

    @property
    def active(self) -> Tensor:
        """[Q] bool: groups with a gradient. In the other groups A = 0 for every w, so their passes are skipped."""
        return active_groups(self._config.algo.baseline, self._scored.rewards)[self._own]

    def __call__(self, prompts: Sequence[int], norms_sq: Tensor) -> Tensor:
        """Coefficients of k prompts.

        Args:
            prompts: their k positions among the rule's own prompts, counted from 0.
            norms_sq: w [k, G].

        Returns:
            c [k, G] fp64 on the CPU.
        """
        scored, config, mean_norm = self._scored, self._config, self._history.running_mean_norm
        chosen = [self._own[prompt] for prompt in prompts]
        norms = norms_sq.to(scored.rewards)
        if facts_of(config.algo.baseline).needs_norms:
            whole = torch.full_like(scored.rewards, mean_norm)
            whole[chosen] = norms
            before = self._before_tempering(whole)
        else:
            before = self._of_rewards
        values = before[chosen] * tempering(norms, mean_norm, config.algo.norm_power) * self._weights[chosen]
        whole = torch.zeros_like(scored.rewards)
        whole[chosen] = values.masked_fill(~norms.isfinite(), 0.0)
        scaled = sample_coefficients(
            whole[self._own].flatten(),
            scored.lengths[self._own].flatten(),
            config.num_prompts,
            config.group_size,
            config.algo.aggregation,
            config.token_scale,
        )
        return scaled.view(len(self._own), -1)[list(prompts)]

    @cached_property
    def _of_rewards(self) -> Tensor:
        """A [Q, G] before tempering, of a baseline that reads no norm: one-pass modes call the rule many times."""
        return self._before_tempering(torch.ones_like(self._scored.rewards))

    def _before_tempering(self, norms: Tensor) -> Tensor:
        scored = self._scored
        return advantages(self._config.algo.baseline, scored.rewards, norms, scored.lengths, self._history)


def energies(coefficients: Tensor, norms_sq: Tensor) -> Tensor:
    """c^2 w of each response: E||g||^2 without the products of different responses. 0 where w is not finite."""
    return coefficients**2 * norms_sq.nan_to_num(posinf=0.0)


def running_mean_norm(norms_sq: Tensor, before: float, share: float = 0.1) -> float:
    """Running mean of w over steps.

    Args:
        norms_sq: w of this step; values that are not finite or not positive are left out.
        before: the mean over earlier steps, 0 for none.
        share: weight of this step.
    """
    known = norms_sq[norms_sq.isfinite() & (norms_sq > 0)]
    if not len(known):
        return before
    mean = float(known.mean())
    return mean if before == 0 else (1 - share) * before + share * mean
