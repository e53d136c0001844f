"""Divide the scoring of a batch among the replicas of a run, and end the run if its reward always fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from oblr_megatron.config.reward import RewardConfig
from oblr_megatron.errors import RunError
from oblr_megatron.rewards.base import Reward, RewardOfEpisodes, RewardResult, cause_of, group_size, joined
from oblr_megatron.runtime.collectives import Collectives, attempt, raise_first
from oblr_megatron.types import Prompt, Sample

logger = logging.getLogger(__name__)

SKEW_S = 300.0
"""Allowed time difference between ranks after the rollout, in addition to the time for scoring."""


class SharedReward(Reward):
    """Every rank calls `score` with the same samples and receives the whole result. Needs a process group.

    Rank 0 logs the first failure of a run with its traceback.

    Args:
        reward: scores this rank's share.
        share: index of this rank's share of the prompts, 0 to shares - 1; None on a rank that scores nothing.
        shares: number of shares; each belongs to one rank.
        timeout_s: parallel.distributed_timeout_s, which may be shorter than SKEW_S.
    """

    def __init__(self, reward: Reward, share: int | None, shares: int, *, timeout_s: float = SKEW_S) -> None:
        self.own = RewardOfEpisodes(reward)
        """Scores on this rank alone; not collective."""
        self._share, self._shares, self._skew_s = share, shares, min(SKEW_S, timeout_s)
        self._collectives = Collectives(dist.get_rank())
        self._reported = False

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Collective; see `Reward.score`.

        Raises:
            RunError: `score` raised on a rank.
            DeadlineError: a rank exceeded the time bound for the largest share, plus the allowed difference.
        """
        own = attempt(lambda: self._score_batch(prompts, samples))
        largest = -(-len(prompts) // self._shares) * group_size(prompts, samples)
        seconds = self.own.longest_s(largest) + self._skew_s
        outcomes = self._collectives.gather(own, what=f"the rewards of {len(samples)} samples", seconds=seconds)
        raise_first(outcomes, own)
        scored: list[tuple[int, RewardResult]] = [outcome.value for outcome in outcomes if outcome.value is not None]
        return self.whole([part for _, part in sorted(scored, key=lambda part: part[0])])

    def whole(self, parts: Sequence[RewardResult]) -> RewardResult:
        """The results of consecutive parts of a batch as one, the same on every rank; reports the first failure."""
        result = joined(parts)
        if result.error and not self._reported and dist.get_rank() == 0:
            logger.warning(
                "a response could not be scored (its term counts 0); later ones are only counted:\n%s", result.error
            )
            self._reported = True
        return result

    def _score_batch(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> tuple[int, RewardResult] | None:
        """(index of this rank's share, its result); None on a rank without a share."""
        if self._share is None:
            return None
        size = group_size(prompts, samples)
        first, last = (len(prompts) * place // self._shares for place in (self._share, self._share + 1))
        return self._share, self.own.score(prompts[first:last], samples[first * size : last * size])

    def close(self) -> None:
        self.own.close()


class NoRewardError(RunError):
    """The reward has failed for every response of several steps, after it had worked."""

    raised_on_all_ranks = True  # every rank counts the same results


class FailedSteps:
    """Counts the steps in a row in which no response got a reward. The same on every rank."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._failed = 0
        self._has_worked = False

    def count(self, results: Sequence[RewardResult]) -> bool:
        """Count a step, given the results of all its batches; whether no response got a reward.

        Raises:
            NoRewardError: reward.max_failed_steps is reached; the steps before are worth saving.
            RunError: it is reached, and no response ever got a reward.
        """
        if any(len(result.faults) < len(result.rewards) for result in results):
            self._failed, self._has_worked = 0, True
            return False
        self._failed += 1
        if self._failed != self._config.max_failed_steps:
            return True
        cause = cause_of(results, self._config)
        kind = NoRewardError if self._has_worked else RunError
        raise kind(f"the reward failed for every response of the last {self._failed} steps: {cause}")
