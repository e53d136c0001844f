"""A reward whose work the replicas of a run share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from oblr_megatron.rewards.base import Reward, RewardResult

if TYPE_CHECKING:
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.types import Prompt, Sample


class SharedReward(Reward):
    """Every rank calls `score` with the same samples and receives the whole result.

    The first rank of each replica judges its replica's share of the prompts; the others only wait.
    """

    def __init__(self, reward: Reward, parallel: Parallel) -> None:
        self._reward, self._parallel = reward, parallel

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Collective; see `Reward.score`."""
        parallel, size = self._parallel, len(samples) // max(len(prompts), 1)
        part = RewardResult([])
        if parallel.tp_rank == 0 and parallel.pp_rank == 0:
            first, last = (
                len(prompts) * place // parallel.dp_size for place in (parallel.dp_rank, parallel.dp_rank + 1)
            )
            part = self._reward.score(prompts[first:last], samples[first * size : last * size])
        parts = [(parallel.dp_rank, part)] * parallel.world_size
        dist.all_gather_object(parts, (parallel.dp_rank, part))
        ordered = [result for _, result in sorted(parts, key=lambda item: item[0])]
        return RewardResult(
            rewards=[reward for result in ordered for reward in result.rewards],
            failures=sum(result.failures for result in ordered),
            timeouts=sum(result.timeouts for result in ordered),
        )

    def close(self) -> None:
        """End what this rank started."""
        self._reward.close()
