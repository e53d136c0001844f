"""The reward "reasoning_gym": each task's own score, 0 to 1, for rows of the sources "reasoning_gym:NAME".

Scored is the text of the last <answer>...</answer>, as the package does it; a response without one scores 0.
"reasoning_gym:whole" scores the whole response, trimmed.

The row names its task, so one reward scores a mixture of tasks. Scoring runs in worker processes under a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from oblr_megatron.rewards.base import PooledReward, RewardResult, collect, pair
from oblr_megatron.rewards.gym_tasks import extracted
from oblr_megatron.rewards.workers.calls import Score
from oblr_megatron.rewards.workers.pool import Pool
from oblr_megatron.types import Prompt, Sample

MODULE = "oblr_megatron.rewards.gym_tasks"


def whole(response: str) -> str | None:
    """The trimmed response; None if nothing is left."""
    return response.strip() or None


GYM_REWARDS: dict[str, Callable[[str], str | None]] = {"reasoning_gym": extracted, "reasoning_gym:whole": whole}
"""Rewards by name, each with the text that it scores."""


class GymReward(PooledReward):
    """Scores a batch; identical answers to the same question are scored once."""

    def __init__(self, extract: Callable[[str], str | None], *, num_workers: int, deadline_s: float) -> None:
        """`extract` returns the answer in a response, or None."""
        pool = Pool(f"{MODULE}:score", num_workers=num_workers, deadline_s=deadline_s, prepare=f"{MODULE}:warm_up")
        super().__init__(pool)
        self._extract = extract

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """The tasks' scores; see `Reward.score`."""
        asked = [(self._extract(sample.text), prompt.columns) for prompt, sample in pair(prompts, samples)]
        distinct = [(answer, row) for answer, row in dict.fromkeys(asked) if answer is not None]
        scores = dict(zip(distinct, self.pool.map(distinct), strict=True))
        missing = Score(value=0.0)
        result = collect([missing if answer is None else scores[answer, row] for answer, row in asked])
        return replace(result, answers=[answer for answer, _ in asked])
