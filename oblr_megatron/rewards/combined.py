"""A weighted sum of rewards: reward.name and reward.terms.

    reward of a sample = sum over the terms of weight * value

If a term fails or times out on a sample, the term counts 0 and the others still count. The fault of such a sample is
that of the first faulty term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oblr_megatron.rewards.base import Fault, Reward, RewardResult
from oblr_megatron.types import Prompt, Sample


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the sum. Example: Term("overlong", 0.5, OverlongReward(2048, 512))."""

    name: str  # as in the config
    weight: float
    reward: Reward


class CombinedReward(Reward):
    """A weighted sum of terms. Its answers are those of the first term."""

    def __init__(self, terms: Sequence[Term]) -> None:
        """`terms`: at least one, with distinct names, the main term first."""
        assert len({term.name for term in terms}) == len(terms) > 0, f"the terms {terms} need distinct names"
        self._terms = tuple(terms)

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """See `Reward.score`. Terms are scored one after another, so that their workers do not compete for cores."""
        results = [term.reward.score(prompts, samples) for term in self._terms]
        named = list(zip(self._terms, results, strict=True))
        weights = [term.weight for term in self._terms]
        columns = zip(*(result.rewards for result in results), strict=True)
        faults: dict[int, Fault] = {}
        for result in reversed(results):
            faults |= result.faults
        return RewardResult(
            rewards=[sum(weight * value for weight, value in zip(weights, values, strict=True)) for values in columns],
            faults=faults,
            error=next((f"{term.name}: {result.error}" for term, result in named if result.error), None),
            answers=results[0].answers,
            by_value=results[0].by_value,
            terms={term.name: result.rewards for term, result in named},
            side_faults=frozenset(faults.keys() - results[0].faults.keys()),
        )

    def longest_s(self, count: int) -> float:
        return sum(term.reward.longest_s(count) for term in self._terms)

    def close(self) -> None:
        for term in self._terms:
            term.reward.close()
