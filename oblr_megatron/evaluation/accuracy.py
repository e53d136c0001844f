"""Accuracy metrics of a set of scored responses, with 95% intervals.

For a prompt with K sampled responses, c of them right:

    mean@K  mean score of the responses
    pass@k  1 - C(K - c, k) / C(K, k): probability that k responses, drawn without replacement, contain a right one;
            unbiased (arXiv 2107.03374, equation 1)
    maj@K   1 if the most frequent answer is right, else 0; with t most frequent answers, each counts 1 / t

The metric of a set is the mean over its prompts. A response is right if its score ("verdict" in SET.jsonl) is at least
1; scores between 0 and 1 contribute to mean@K only. A response that could not be scored has the score 0.

Intervals. Greedy accuracy and pass@K are 0 or 1 for each prompt, so they have Wilson's interval of a proportion. The
other metrics have percentile bootstraps over prompts: responses to one prompt are not independent samples of the
benchmark. A bootstrap of equal values has no width. Equal values in [0, 1] therefore have Wilson's interval, too. It is
wide enough: of all distributions on [0, 1] with the same mean, 0/1 values have the largest variance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oblr_megatron.rewards.votes import answer_classes

Array = NDArray[np.float64]

RIGHT = 1.0  # smallest score of a right response
RESAMPLES = 4000
CHUNK = 2**22  # prompts drawn at once, summed over resamples


@dataclass(frozen=True, slots=True)
class Grade:
    """Facts about a response that metrics need. Example: Grade(verdict=1.0, answer="4", tokens=31, truncated=False)"""

    verdict: float  # score by the main reward, unweighted
    answer: str | None  # None: no answer found
    tokens: int
    truncated: bool  # at the length limit
    reads_answers: bool = True  # whether the reward extracts answers
    scored: bool = True  # False: the main reward failed or was late, and the verdict 0 says nothing
    by_value: bool = False  # whether votes compare the answer as mathematics; else as text

    @property
    def right(self) -> bool:
        """Whether the response is right."""
        return is_right(self.verdict)


@dataclass(frozen=True, slots=True)
class Grades:
    """The responses of a set. Example, Q = 1, k = 2: Grades(greedy=[right], sampled=[right, wrong], k=2)"""

    greedy: Sequence[Grade]  # [Q], at least one
    sampled: Sequence[Grade]  # [Q * k], prompt-major
    k: int  # samples per prompt, may be 0
    fault: str = ""  # why the first block with unscored responses has them, in one line

    def __post_init__(self) -> None:
        counts = f"{len(self.greedy)} greedy and {len(self.sampled)} sampled responses with k = {self.k}"
        assert self.greedy and len(self.sampled) == len(self.greedy) * self.k, counts

    @property
    def unscored(self) -> int:
        """Number of responses that could not be scored."""
        return sum(not grade.scored for grade in (*self.greedy, *self.sampled))

    @property
    def lost(self) -> list[str]:
        """The kinds of responses ("greedy", "sampled") of which none was scored."""
        kinds = {"greedy": self.greedy, "sampled": self.sampled}
        return [kind for kind, grades in kinds.items() if grades and not any(grade.scored for grade in grades)]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric with its 95% interval. Example: Estimate(value=0.8, low=0.49, high=0.94)"""

    value: float
    low: float
    high: float


def is_right(score: float) -> bool:
    """Whether a response with this score is right."""
    return score >= RIGHT


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Unbiased estimate for one prompt. Examples: pass_at_k(1, 4, 1) = 0.25; pass_at_k(1, 4, 4) = 1."""
    assert 0 <= right <= samples and 1 <= k <= samples, f"{right} right of {samples}, k = {k}"
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(group: Sequence[Grade]) -> float:
    """maj@K of one prompt. Responses without an answer do not vote.

    Example: answers "4" (right), "5", "4" -> 1; "4", "5" -> 0.5; "5", None -> 0.
    """
    by_value = any(grade.by_value for grade in group)
    classes = answer_classes([grade.answer for grade in group], [grade.right for grade in group], by_value=by_value)
    votes = Counter(number for number in classes if number is not None)
    most = max(votes.values(), default=0)
    leading = {number for number, count in votes.items() if count == most}
    right = {number for number, grade in zip(classes, group, strict=True) if grade.right}
    return len(leading & right) / len(leading) if leading else 0.0


def powers_of_two(last: int) -> list[int]:
    """1, 2, 4, ... and `last`. Examples: powers_of_two(6) = [1, 2, 4, 6]; powers_of_two(0) = []."""
    return sorted({2**power for power in range(last.bit_length())} | {last} - {0})


def by_prompt(grades: Grades) -> dict[str, Array]:
    """[Q] values of each metric: accuracy, mean@K, pass@1, pass@2, pass@4, ..., pass@K, maj@K.

    maj@K is omitted if the reward extracts no answers.
    """
    k = grades.k
    groups = [grades.sampled[first : first + k] for first in range(0, len(grades.sampled), k or 1)]  # [Q] of k samples
    columns = {"accuracy": [float(grade.right) for grade in grades.greedy]}
    if k:
        columns[f"mean@{k}"] = [math.fsum(grade.verdict for grade in group) / k for group in groups]
        right = [sum(grade.right for grade in group) for group in groups]
        columns |= {f"pass@{few}": [pass_at_k(count, k, few) for count in right] for few in powers_of_two(k)}
    if k and all(grade.reads_answers for grade in grades.sampled):
        columns[f"maj@{k}"] = [majority(group) for group in groups]
    return {name: np.array(values) for name, values in columns.items()}


def metrics(grades: Grades) -> dict[str, float]:
    """A set's metrics by their names in metrics.jsonl, without intervals; pass@k for k = K only.

    If no greedy response was scored, accuracy is omitted; if no sampled one was, the metrics at K are.

    Example: {"accuracy": 0.5, "mean_at_k": 0.25, "pass_at_k": 0.5, "maj_at_k": 0.5, "response_length": 31.5,
              "truncated_fraction": 0.0, "unscored": 0}
    """
    names = {} if "greedy" in grades.lost else {"accuracy": "accuracy"}
    if "sampled" not in grades.lost:
        names |= {f"{name}@{grades.k}": f"{name}_at_k" for name in ("mean", "pass", "maj")}
    means = {names[name]: _mean(values) for name, values in by_prompt(grades).items() if name in names}
    return means | lengths(grades) | {"unscored": grades.unscored}


def lengths(grades: Grades) -> dict[str, float]:
    """Mean number of tokens and share of truncated responses, over greedy and sampled responses."""
    responses = [*grades.greedy, *grades.sampled]
    return {
        "response_length": sum(grade.tokens for grade in responses) / len(responses),
        "truncated_fraction": sum(grade.truncated for grade in responses) / len(responses),
    }


def estimates(grades: Grades) -> dict[str, Estimate]:
    """Every metric of `by_prompt` with its interval; deterministic."""
    columns = by_prompt(grades)
    ends = dict(zip(columns, bootstrap_intervals(np.array([*columns.values()])), strict=True))
    return {name: Estimate(_mean(values), *ends[name]) for name, values in columns.items()}


def wilson_interval(right: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion (1927), 95%; (0, 1) for count = 0.

    Example: wilson_interval(8, 10) = (0.490, 0.943).
    """
    if count == 0:
        return 0.0, 1.0
    share, z = right / count, 1.96
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(max(share * (1 - share), 0.0) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return min(max(low, 0.0), share), max(min(high, 1.0), share)  # rounding may move an end past the share


def bootstrap_intervals(values: Array, seed: int = 0) -> list[tuple[float, float]]:
    """95% percentile intervals of the means of [F, Q] values; all F metrics share the resamples of the Q prompts."""
    metrics, prompts = values.shape
    generator = np.random.default_rng(seed)
    means = np.empty((metrics, RESAMPLES))
    step = max(1, CHUNK // prompts)
    for first in range(0, RESAMPLES, step):
        count = min(step, RESAMPLES - first)
        drawn = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=count)  # count of each prompt
        means[:, first : first + count] = values @ drawn.T / prompts
    low, high = np.percentile(means, (2.5, 97.5), axis=1)
    return [_with_width(row, float(a), float(b)) for row, a, b in zip(values, low, high, strict=True)]


def _with_width(values: Array, low: float, high: float) -> tuple[float, float]:
    """Wilson's interval for zeros and ones, and for equal values in [0, 1]; else the bootstrap's."""
    if values.min() < values.max() and not np.isin(values, (0.0, 1.0)).all():
        return low, high
    value = float(values[0])
    return wilson_interval(float(values.sum()), len(values)) if 0 <= value <= 1 else (value, value)


def _mean(values: NDArray[Any]) -> float:
    return math.fsum(values) / len(values)
