r"""The reward for mathematical answers: 1 if the response's boxed answer equals the gold one exactly, else 0.

What plain text and exact fractions settle is settled on the spot; the rest goes to worker processes under a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from oblr_megatron.rewards.base import PooledReward, RewardResult, pair
from oblr_megatron.rewards.compare import Unsettled, equal_answers, unsettled
from oblr_megatron.rewards.extract import boxed
from oblr_megatron.rewards.pool import Outcome, Pool
from oblr_megatron.types import Prompt, Sample

WORKERS = 2  # of `grade`
DEADLINE_S = 10.0


def grade(prediction: str, gold: str) -> bool:
    r"""Whether a response's answer, the last complete \boxed{...}, equals the gold one.

    Exact: 0.5 is 1/2 and 0.33 is not 1/3; lists and sets ignore order, tuples and matrices keep it; units, degree,
    percent and currency signs, `x =` and thousands separators are ignored. May be called from any thread and any
    process; returns within DEADLINE_S, False when judging takes longer.

    Examples: grade(r"... \boxed{\frac{1}{2}}", "0.5") is True; grade("42", "42") is False: there is no box.

    Raises:
        RunError: the worker processes cannot be started.
    """
    answer = boxed(prediction)
    if answer is None:
        return False
    settled = settle(answer, gold)
    return _shared_pool().ask(answer, gold).value == 1.0 if settled is None else settled


def settle(answer: str, gold: str) -> bool | None:
    """The verdict if it needs no computer algebra, else None."""
    try:
        return equal_answers(answer, gold, unsettled)
    except Unsettled:
        return None


def make_pool(num_workers: int, deadline_s: float) -> Pool:
    """Workers that judge extracted answers."""
    judge = "oblr_megatron.rewards.symbolic:judge"
    prepare = "oblr_megatron.rewards.latex:warm_up"
    return Pool(judge, num_workers=num_workers, deadline_s=deadline_s, prepare=prepare)


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
        pairs = [(self._extract(sample.text), prompt.answer) for prompt, sample in pair(prompts, samples)]
        verdicts: dict[tuple[str, str], Outcome] = {}
        open_pairs: list[tuple[str, str]] = []
        for answer, gold in dict.fromkeys(pairs):
            if answer is None:
                continue
            settled = settle(answer, gold)
            if settled is None:
                open_pairs.append((answer, gold))
            else:
                verdicts[answer, gold] = Outcome(value=float(settled))
        verdicts.update(zip(open_pairs, self.pool.map(open_pairs), strict=True))
        wrong = Outcome(value=0.0)
        return self.collect([wrong if answer is None else verdicts[answer, gold] for answer, gold in pairs])
