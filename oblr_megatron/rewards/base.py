"""The interface of all rewards: `Reward.score` on a batch gives a `RewardResult`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

from oblr_megatron.processes.calls import BATCH, Score
from oblr_megatron.processes.pool import START_S, Pool
from oblr_megatron.types import Prompt, Sample

if TYPE_CHECKING:
    from oblr_megatron.config.reward import RewardConfig

Fault = Literal["failed", "late"]
TRACEBACK = "Traceback (most recent call last):"
MAX_CAUSE = 300  # characters


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The rewards of a batch.

    Example, a sum of two terms, second sample timed out: RewardResult(
        rewards=[1.1, 0.0], faults={1: "late"}, answers=["4", None], terms={"math": [1.0, 0.0], "format": [1.0, 0.0]})
    """

    rewards: list[float]  # [N] the values that training maximizes
    faults: dict[int, Fault] = field(default_factory=dict)  # by position; see `failures` and `timeouts`
    error: str | None = None  # traceback of the first failure
    answers: list[str | None] | None = None  # [N] extracted answers; None if the reward extracts none
    terms: dict[str, list[float]] = field(default_factory=dict)  # of a sum: [N] unweighted values, main term first
    side_faults: frozenset[int] = frozenset()  # of a sum: positions in `faults` where the main term has a value
    by_value: bool = False  # whether votes compare the answers as mathematics; else as texts

    @property
    def failures(self) -> int:
        """Samples that raised or got a reward that is not finite; their value, in a sum their term, is 0."""
        return sum(fault == "failed" for fault in self.faults.values())

    @property
    def timeouts(self) -> int:
        """Samples that exceeded the scoring deadline; their value, in a sum their term, is 0."""
        return sum(fault == "late" for fault in self.faults.values())

    @property
    def cause(self) -> str:
        """One line of `error`: the last of a traceback, after the name of a sum's term; empty without an error."""
        lines = (self.error or "").splitlines() or [""]
        term = lines[0].removesuffix(TRACEBACK) if lines[0].endswith(TRACEBACK) else ""
        return (term + next((line for line in reversed(lines) if line[:1].strip()), ""))[:MAX_CAUSE]

    @property
    def unscored(self) -> set[int]:
        """Positions without a value of the main term; `main_rewards` has 0 there."""
        return self.faults.keys() - self.side_faults

    @property
    def main_rewards(self) -> list[float]:
        """[N] unweighted values of the main term, from which accuracy is computed."""
        return next(iter(self.terms.values()), self.rewards)


class Reward(ABC):
    """Scores responses. A context manager that calls `close`."""

    @abstractmethod
    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Score every sample.

        Args:
            prompts: [Q], of a step or of any part of it.
            samples: [N] prompt-major: the same number of responses to each prompt, in the prompts' order.

        Raises:
            RunError: worker processes cannot be started. No response text causes an exception.
        """

    def longest_s(self, count: int) -> float:
        """Upper bound on the seconds for scoring `count` samples; 0 for a linear scan in this process."""
        return 0.0

    def close(self) -> None:
        """End workers and connections; may be called twice."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def pair(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[tuple[Prompt, Sample]]:
    """Each sample with its prompt; N samples in prompt-major order."""
    size = group_size(prompts, samples)
    assert len(samples) == size * len(prompts), f"{len(samples)} samples do not divide among {len(prompts)} prompts"
    pairs = [(prompts[position // size], sample) for position, sample in enumerate(samples)]
    for prompt, sample in pairs:
        assert sample.prompt_ids == prompt.token_ids, f"a sample of group {sample.group} is not of prompt {prompt.id!r}"
    return pairs


def group_size(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> int:
    """Responses to each prompt."""
    return len(samples) // max(len(prompts), 1)


def texts(prompts: Sequence[Prompt], samples: Sequence[Sample], names: Sequence[str]) -> list[tuple[str, ...]]:
    """The arguments `names` of a user's function for each sample; names as in `calls.BATCH`. The row is JSON."""
    rows: list[tuple[str, ...]] = []
    for prompt, sample in pair(prompts, samples):
        values = dict(zip(BATCH, (sample.text, prompt.answer, prompt.text, prompt.columns), strict=True))
        rows.append(tuple(values[name] for name in names))
    return rows


def whole_groups(batch_size: int, group: int) -> int:
    """`batch_size` rounded up to whole groups. Example: whole_groups(20, 8) = 24."""
    return -(-batch_size // max(group, 1)) * max(group, 1)


def collect(scores: Sequence[Score]) -> RewardResult:
    """The scores as a result: failed and late samples score 0, `error` is the first traceback."""
    return RewardResult(
        [score.value or 0.0 for score in scores],
        faults={n: "late" if one.timed_out else "failed" for n, one in enumerate(scores) if one.value is None},
        error=next((score.error for score in scores if score.error), None),
    )


def score_answers(
    asked: Sequence[tuple[str | None, tuple[str, ...]]], score: Callable[[list[tuple[str, ...]]], Sequence[Score]]
) -> RewardResult:
    """Score extracted answers. Identical answers to the same question are scored once.

    Args:
        asked: [N] answer and question; a response without an answer (None) scores 0.
        score: the scores of tuples (answer, *question), all of them different.
    """
    distinct = [(answer, *question) for answer, question in dict.fromkeys(asked) if answer is not None]
    scores = dict(zip(distinct, score(distinct), strict=True))
    wrong = Score(value=0.0)
    result = collect([wrong if answer is None else scores[answer, *question] for answer, question in asked])
    return replace(result, answers=[answer for answer, _ in asked])


def joined(parts: Sequence[RewardResult]) -> RewardResult:
    """Concatenate the results of consecutive parts of a batch."""
    starts = [sum(len(part.rewards) for part in parts[:place]) for place in range(len(parts))]
    placed = list(zip(starts, parts, strict=True))
    read = [part.answers for part in parts if part.answers is not None]
    names = next((list(part.terms) for part in parts if part.terms), [])
    return RewardResult(
        rewards=[reward for part in parts for reward in part.rewards],
        faults={start + n: fault for start, part in placed for n, fault in part.faults.items()},
        error=next((part.error for part in parts if part.error), None),
        answers=[answer for answers in read for answer in answers] if read else None,
        by_value=any(part.by_value for part in parts),
        terms={name: [value for part in parts for value in part.terms[name]] for name in names},
        side_faults=frozenset(start + n for start, part in placed for n in part.side_faults),
    )


def divided(result: RewardResult, parts: int) -> list[RewardResult]:
    """The inverse of `joined` for parts of equal size; the error goes to the first part with a fault."""
    size, results, error = len(result.rewards) // max(parts, 1), list[RewardResult](), result.error
    for own in (slice(part * size, (part + 1) * size) for part in range(parts)):
        faults = {n - own.start: fault for n, fault in result.faults.items() if own.start <= n < own.stop}
        answers = None if result.answers is None else result.answers[own]
        terms = {name: values[own] for name, values in result.terms.items()}
        side = frozenset(n - own.start for n in result.side_faults if own.start <= n < own.stop)
        cause = error if faults else None
        results.append(RewardResult(result.rewards[own], faults, cause, answers, terms, side, result.by_value))
        error = None if faults else error
    return results


def cause_of(results: Sequence[RewardResult], config: RewardConfig) -> str:
    """Why responses got no reward, in one line: the first error, or the reason of faults without an error."""
    cause = next((result.cause for result in results if result.error), "")
    if cause:
        return cause
    if all(fault == "late" for result in results for fault in result.faults.values()):
        return f"no call of {', '.join(config.names)} ended within reward.timeout_s, {config.timeout_s:g} s"
    return "see the run's log"


class RewardOfEpisodes(Reward):
    """Another reward, but an episode that failed or was late has none (docs/environments.md): it counts as a fault."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        result = self._reward.score(prompts, samples)
        faults: dict[int, Fault] = {}
        for place, sample in enumerate(samples):
            if sample.finish_reason in ("failed", "late"):
                faults[place] = sample.finish_reason
        if not faults:
            return result

        def without(values: Sequence[float]) -> list[float]:
            return [0.0 if place in faults else value for place, value in enumerate(values)]

        return replace(
            result,
            rewards=without(result.rewards),
            faults=result.faults | faults,
            error=result.error or "the episode failed or was late: the log shows the first error",
            terms={name: without(values) for name, values in result.terms.items()},
            side_faults=result.side_faults - faults.keys(),
        )

    def longest_s(self, count: int) -> float:
        return self._reward.longest_s(count)

    def close(self) -> None:
        self._reward.close()


class SampleReward(Reward):
    """A function of each sample, called in this process: it must end soon, whatever the text."""

    def __init__(self, value_of: Callable[[Sample], float]) -> None:
        self._value_of = value_of

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        return RewardResult([float(self._value_of(sample)) for _, sample in pair(prompts, samples)])


class PooledReward(Reward):
    """A reward that scores in worker processes."""

    def __init__(self, pool: Pool, *, together: int = 1) -> None:
        """`together`: responses scored in one call."""
        self.pool, self.together = pool, together

    def longest_s(self, count: int) -> float:
        """The start of the workers, plus every call at its deadline."""
        calls = -(-count // self.together)
        return START_S + -(-calls // self.pool.num_workers) * self.pool.limit_s

    def close(self) -> None:
        self.pool.close()
