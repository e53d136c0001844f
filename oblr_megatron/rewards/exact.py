"""The reward "exact_match": 1 if the response equals the gold answer, white space aside."""

from __future__ import annotations

from collections.abc import Sequence

from oblr_megatron.rewards.base import Reward, RewardResult, pair
from oblr_megatron.types import Prompt, Sample


class ExactMatchReward(Reward):
    """Compares after trimming and taking runs of white space as one space; judged on the spot."""

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Rewards in {0, 1}; the answers are the whole responses. See `Reward.score`."""
        pairs = [(one_line(sample.text), one_line(prompt.answer)) for prompt, sample in pair(prompts, samples)]
        return RewardResult(
            [float(answer == gold) for answer, gold in pairs], answers=[answer or None for answer, _ in pairs]
        )


def one_line(text: str) -> str:
    r"""Runs of white space as one space. Example: " 4\n2 " -> "4 2"."""
    return " ".join(text.split())
