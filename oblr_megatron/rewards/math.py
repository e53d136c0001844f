r"""The reward for mathematical answers: 1 if the response's boxed answer equals the gold one exactly, else 0.

What plain text and exact fractions settle is settled on the spot; the rest goes to worker processes under a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from oblr_megatron.rewards.base import PooledReward, RewardResult, collect, pair
from oblr_megatron.rewards.verifier.compare import Unsettled, equal_answers, unsettled
from oblr_megatron.rewards.verifier.extract import boxed
from oblr_megatron.rewards.verifier.tolerance import within
from oblr_megatron.rewards.workers.pool import Outcome, Pool
from oblr_megatron.types import Prompt, Sample

WORKERS = 2  # of `grade`
DEADLINE_S = 10.0


def grade(prediction: str, gold: str, tolerance: str = "") -> bool:
    r"""Whether a response's answer, the last complete \boxed{...}, equals the gold one.

    Exact: 0.5 is 1/2 and 0.33 is not 1/3; lists and sets ignore order, tuples and matrices keep it; units, degree,
    percent and currency signs, `x =` and thousands separators are ignored. May be called from any thread and any
    process; returns within DEADLINE_S, False when judging takes longer.

    Args:
        prediction: the response.
        gold: the gold answer as the data set gives it.
        tolerance: how far off a plain number may be: "0.1", or "1%" of the gold; "" for exact.

    Examples: grade(r"... \boxed{\frac{1}{2}}", "0.5") is True; grade("42", "42") is False: there is no box.

    Raises:
        RunError: the worker processes cannot be started.
    """
    answer = boxed(prediction)
    if answer is None:
        return False
    settled = settle(answer, gold, tolerance)
    return _shared_pool().ask(answer, gold).value == 1.0 if settled is None else settled


def settle(answer: str, gold: str, tolerance: str = "") -> bool | None:
    """The verdict if it needs no computer algebra, else None. For `tolerance` see `within`."""
    near = within(answer, gold, tolerance) if tolerance else None
    if near is not None:
        return near
    try:
        return equal_answers(answer, gold, unsettled)
    except Unsettled:
        return None


def make_pool(num_workers: int, deadline_s: float) -> Pool:
    """Workers that judge extracted answers."""
    target = "oblr_megatron.rewards.verifier.symbolic:score"
    prepare = "oblr_megatron.rewards.verifier.latex:warm_up"
    return Pool(target, num_workers=num_workers, deadline_s=deadline_s, prepare=prepare)


@cache
def _shared_pool() -> Pool:
    """One pool for all callers of `grade`; it ends with the process."""
    return make_pool(WORKERS, DEADLINE_S)


class MathReward(PooledReward):
    """Scores a batch; equal answers to the same question are judged once."""

    def __init__(self, extract: Callable[[str], str | None], *, num_workers: int, deadline_s: float) -> None:
        """`extract` finds the answer in a response, or None."""
        super().__init__(make_pool(num_workers, deadline_s))
        self._extract = extract

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Rewards in {0, 1}; see `Reward.score`."""
        questions = [
            (self._extract(sample.text), prompt.answer, prompt.tolerance) for prompt, sample in pair(prompts, samples)
        ]
        verdicts = self._score_batch([(a, gold, bound) for a, gold, bound in dict.fromkeys(questions) if a is not None])
        wrong = Outcome(value=0.0)
        result = collect([wrong if question[0] is None else verdicts[question] for question in questions])
        return replace(result, answers=[answer for answer, _, _ in questions])

    def _score_batch(self, questions: Sequence[tuple[str, str, str]]) -> dict[tuple[str | None, str, str], Outcome]:
        """The verdict on each (answer, gold, tolerance)."""
        verdicts: dict[tuple[str | None, str, str], Outcome] = {}
        undecided: list[tuple[str, str, str]] = []
        for question in questions:
            settled = settle(*question)
            if settled is None:
                undecided.append(question)
            else:
                verdicts[question] = Outcome(value=float(settled))
        outcomes = self.pool.map([(answer, gold) for answer, gold, _ in undecided])
        return verdicts | dict(zip(undecided, outcomes, strict=True))
