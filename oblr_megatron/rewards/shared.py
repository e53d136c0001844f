"""A reward whose work the replicas of a run share."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from oblr_megatron.rewards.base import Reward, RewardResult, group_size, joined
from oblr_megatron.runtime.collectives import Collectives, attempt, raise_first
from oblr_megatron.types import Prompt, Sample

logger = logging.getLogger(__name__)

SLACK_S = 300.0
"""By how much ranks that sampled together may be apart, beside the time that judging takes."""


class SharedReward(Reward):
    """Every rank calls `score` with the same samples and receives the whole result; needs a process group.

    The first failure of a run is logged with its traceback, by rank 0.

    Args:
        reward: judges this rank's share.
        share: which part of the prompts that is, 0 to shares - 1; None on a rank that only listens.
        shares: parts in all; each belongs to one rank.
    """

    def __init__(self, reward: Reward, share: int | None, shares: int) -> None:
        self._reward, self._share, self._shares = reward, share, shares
        self._collectives = Collectives(dist.get_rank())
        self._reported = False

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Collective; see `Reward.score`.

        Raises:
            RunError: the judging of a rank failed as a whole.
            DeadlineError: a rank took longer than its share can take.
        """
        own = attempt(lambda: self._score_batch(prompts, samples))
        largest = -(-len(prompts) // self._shares) * group_size(prompts, samples)
        seconds = self._reward.longest_s(largest) + SLACK_S
        outcomes = self._collectives.gather(own, what=f"the rewards of {len(samples)} samples", seconds=seconds)
        raise_first(outcomes, own)
        scored: list[tuple[int, RewardResult]] = [outcome.value for outcome in outcomes if outcome.value is not None]
        result = joined([part for _, part in sorted(scored, key=lambda part: part[0])])
        if result.error and not self._reported and dist.get_rank() == 0:
            logger.warning("judging a response failed; it scores 0, later ones are only counted:\n%s", result.error)
            self._reported = True
        return result

    def _score_batch(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> tuple[int, RewardResult] | None:
        """(this rank's share, its result); None on a rank that only listens."""
        if self._share is None:
            return None
        size = group_size(prompts, samples)
        first, last = (len(prompts) * place // self._shares for place in (self._share, self._share + 1))
        return self._share, self._reward.score(prompts[first:last], samples[first * size : last * size])

    def close(self) -> None:
        """End what this rank started."""
        self._reward.close()
