"""From norms to coefficients of the loss, for all prompts of a step or for some, as their norms become known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from oblr_megatron.algo.baseline import advantages
from oblr_megatron.algo.loss import sample_coefficients
from oblr_megatron.algo.token_baseline import token_advantages

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.types import Scored


class AdvantageRule:
    """c = A / divisor of chosen prompts, A = r - b(w).

    A sample whose norm is not finite gets 0: its gradient is no number either, and one such sample must not end the
    run.

    Args:
        judged: rewards and lengths of the whole step.
        config: the baseline and the aggregation.
        usual_norm: stands for the norms of the prompts that are not asked about. A baseline looks at them only to tell
            whether a group's norms are next to nothing; it is a mean of earlier steps, so that it depends on no sample
            of this one.
    """

    def __init__(self, scored: Scored, config: Config, usual_norm: float) -> None:
        self._scored, self._config, self._usual = scored, config, usual_norm

    def __call__(self, prompts: Sequence[int], norms_sq: Tensor) -> Tensor:
        """Positions of k prompts, w [k, G] -> c [k, G] fp64."""
        rewards, lengths, config = self._scored.rewards, self._scored.lengths, self._config
        chosen = list(prompts)
        norms = torch.full_like(rewards, self._usual)
        norms[chosen] = norms_sq
        values = advantages(config.algo.baseline, rewards, norms, lengths, config.algo)
        values = values.masked_fill(~norms.isfinite(), 0.0)
        coefficients = sample_coefficients(
            values.flatten(), lengths.flatten(), len(rewards), rewards.shape[1], config.algo.aggregation
        )
        return coefficients.view(rewards.shape)[chosen]

    def of_tokens(self, energies: Tensor) -> Tensor:
        """Energies of the tokens [N, T] -> their coefficients c [N, T] fp64, of a baseline that is token-wise.

        A sample with an energy that is not finite weighs nothing in its group and gets 0.
        """
        rewards, lengths = self._scored.rewards, self._scored.lengths
        broken = ~energies.isfinite().all(-1, keepdim=True)
        values = token_advantages(rewards, energies.masked_fill(broken, 0.0), lengths).masked_fill(broken, 0.0)
        aggregation = self._config.algo.aggregation
        return sample_coefficients(values, lengths.flatten(), len(rewards), rewards.shape[1], aggregation)


def usual(norms_sq: Tensor, before: float, share: float = 0.1) -> float:
    """Running mean of w over steps: the finite, positive norms of this one, mixed into what was known `before`."""
    known = norms_sq[norms_sq.isfinite() & (norms_sq > 0)]
    if not len(known):
        return before
    mean = float(known.mean())
    return mean if before == 0 else (1 - share) * before + share * mean
