r"""The reward "math": 1 if the response's boxed answer equals the gold answer exactly, else 0.

Most pairs are decided in this process by comparing text and exact fractions. The rest needs computer algebra, in worker
processes under a deadline.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from oblr_megatron.processes.calls import Score
from oblr_megatron.processes.pool import Pool
from oblr_megatron.rewards.base import PooledReward, RewardResult, pair, score_answers
from oblr_megatron.rewards.verifier.compare import Unsettled, equal_answers, unsettled
from oblr_megatron.rewards.verifier.extract import boxed
from oblr_megatron.rewards.verifier.tolerance import within
from oblr_megatron.types import Prompt, Sample

WORKERS = 2  # processes of `grade`
DEADLINE_S = 10.0
TARGET = "oblr_megatron.rewards.verifier.symbolic:score"  # compares extracted answers by computer algebra
PREPARE = "oblr_megatron.rewards.verifier.latex:warm_up"


def grade(prediction: str, gold: str, tolerance: str = "") -> bool:
    r"""Whether a response's answer, the last complete \boxed{...}, equals the gold answer.

    Comparison is exact: 0.5 equals 1/2, but 0.33 is not 1/3. Order matters in tuples and matrices, not in lists and
    sets. Units, degree, percent and currency signs, `x =` and thousands separators are ignored. Can be called from any
    thread and process. Returns False if the comparison takes longer than DEADLINE_S.

    Args:
        prediction: the response.
        gold: the gold answer as in the data set.
        tolerance: allowed error of a plain number: "0.1" absolute, "1%" relative to the gold answer, "" exact.

    Examples: grade(r"... \boxed{\frac{1}{2}}", "0.5") is True; grade("42", "42") is False: no box.

    Raises:
        RunError: the worker processes cannot be started.
    """
    answer = boxed(prediction)
    if answer is None:
        return False
    settled = settle(answer, gold, tolerance)
    return _shared().pool.ask(answer, gold).value == 1.0 if settled is None else settled


def settle(answer: str, gold: str, tolerance: str = "") -> bool | None:
    """Whether an extracted answer is right; None if only computer algebra can tell. For `tolerance` see `within`."""
    try:
        near = within(answer, gold, tolerance) if tolerance else None
        return equal_answers(answer, gold, unsettled) if near is None else near
    except Unsettled:
        return None
    except (RecursionError, ArithmeticError, ValueError):  # a text too deep, or with numbers too large, to be read
        return False


class MathReward(PooledReward):
    """Scores a batch; identical answers to the same question are scored once."""

    def __init__(self, extract: Callable[[str], str | None], *, num_workers: int, deadline_s: float) -> None:
        """`extract` returns the answer in a response, or None."""
        super().__init__(Pool(TARGET, num_workers=num_workers, deadline_s=deadline_s, prepare=PREPARE))
        self._extract = extract

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Rewards in {0, 1}; see `Reward.score`."""
        asked = [
            (self._extract(sample.text), (prompt.answer, prompt.tolerance)) for prompt, sample in pair(prompts, samples)
        ]
        return replace(score_answers(asked, self._score_batch), by_value=True)

    def _score_batch(self, questions: Sequence[tuple[str, ...]]) -> list[Score]:
        """The score of each (answer, gold, tolerance)."""
        settled = [_settled(*question) for question in questions]
        undecided = [question[:2] for question, score in zip(questions, settled, strict=True) if score is None]
        pooled = iter(self.pool.map(undecided))
        return [next(pooled) if score is None else score for score in settled]


def _settled(answer: str, gold: str, tolerance: str) -> Score | None:
    """The score by `settle`; None if only computer algebra can tell."""
    try:
        right = settle(answer, gold, tolerance)
    except Exception:  # noqa: BLE001 - a fault of the verifier costs the reward of one response, not the run
        return Score(error=traceback.format_exc())
    return None if right is None else Score(value=float(right))


@cache
def _shared() -> MathReward:
    """The workers of `grade`, shared by all callers; they end with the process."""
    return MathReward(boxed, num_workers=WORKERS, deadline_s=DEADLINE_S)
