"""What every reward is: `score` on a batch, closed at the end; and what those that judge in worker processes share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from oblr_megatron.rewards.pool import Outcome, Pool
from oblr_megatron.rewards.workers import START_S
from oblr_megatron.types import Prompt, Sample


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The rewards of a batch.

    Example of a sum of two: RewardResult(rewards=[1.1, 0.0], answers=["4", None],
                                          terms={"math": [1.0, 0.0], "format": [1.0, 0.0]})
    """

    rewards: list[float]  # [N] one for each sample: what training maximises
    failures: int = 0  # samples whose judging raised or gave no finite number; they score 0
    timeouts: int = 0  # samples whose judging ran past its deadline; they score 0
    error: str | None = None  # traceback of the first failure
    answers: list[str | None] | None = None  # [N] what was read as the answer; None where the reward reads none
    terms: dict[str, list[float]] = field(default_factory=dict)  # [N] each, unweighted, of a sum; the main one first

    @property
    def verdicts(self) -> list[float]:
        """[N] what accuracy is counted from: the main reward's own values."""
        return next(iter(self.terms.values()), self.rewards)


class Reward(ABC):
    """Judges responses. A context manager; `close` ends what it started."""

    @abstractmethod
    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Judge every sample.

        Args:
            prompts: [Q], of a step or of any part of it.
            samples: [N] prompt-major: the same number of responses to each prompt, in the prompts' order.

        Raises:
            RunError: worker processes cannot be started. Nothing that a judged text does raises.
        """

    def longest_s(self, count: int) -> float:
        """Seconds after which the judging of so many samples is over, whatever they are; 0 if it takes no time."""
        return 0.0

    def close(self) -> None:
        """End what the reward started; may be called twice."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pair(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[tuple[Prompt, Sample]]:
    """Each sample with the prompt it answers; N samples in prompt-major order."""
    size = len(samples) // max(len(prompts), 1)
    assert len(samples) == size * len(prompts), f"{len(samples)} samples do not divide among {len(prompts)} prompts"
    pairs = [(prompts[position // size], sample) for position, sample in enumerate(samples)]
    for prompt, sample in pairs:
        assert sample.prompt_ids == prompt.token_ids, f"a sample of group {sample.group} meets prompt {prompt.id!r}"
    return pairs


class PooledReward(Reward):
    """A reward that judges in worker processes."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def longest_s(self, count: int) -> float:
        """Every sample runs into its deadline; and the workers were to be started."""
        return START_S + -(-count // self.pool.num_workers) * self.pool.deadline_s

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    def collect(self, outcomes: Sequence[Outcome]) -> RewardResult:
        """Count what failed; the first failure's traceback goes with the result."""
        failed = [outcome.error for outcome in outcomes if outcome.error]
        late = sum(outcome.timed_out for outcome in outcomes)
        values = [outcome.value or 0.0 for outcome in outcomes]
        return RewardResult(values, failures=len(failed), timeouts=late, error=failed[0] if failed else None)
