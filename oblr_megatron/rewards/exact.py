"""The reward "exact_match": 1 if the response equals the gold answer, white space aside."""

from __future__ import annotations

from collections.abc import Sequence

from oblr_megatron.rewards.base import Reward, RewardResult, pair
from oblr_megatron.types import Prompt, Sample


class ExactMatchReward(Reward):
    """Compares after trimming and taking runs of white space as one space; judged on the spot."""

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Rewards in {0, 1}; see `Reward.score`."""
        return RewardResult([float(same_text(sample.text, prompt.answer)) for prompt, sample in pair(prompts, samples)])


def same_text(response: str, answer: str) -> bool:
    r"""Example: same_text(" 4\n2 ", "4 2") is True, same_text("42", "4 2") is False."""
    return response.split() == answer.split()
