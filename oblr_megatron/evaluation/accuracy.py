"""What the verdicts of a set say about the model, and how sure that is. Pure.

Of a prompt with K sampled responses, c of them right:

    mean@K  the mean of their verdicts
    pass@k  1 - C(K - c, k) / C(K, k): the chance that k of them, drawn without replacement, hold a right one; unbiased
            (arXiv 2107.03374, equation 1)
    maj@K   1 if the answer given most often is right, 0 if not; of t answers given equally often each counts 1 / t

A set's figure is the mean over its prompts. A response is right when its verdict is 1 or more; verdicts between 0 and 1
count for mean@K alone. The interval of the greedy accuracy is Wilson's, 95% for a proportion. The others come from a
percentile bootstrap over prompts: the responses to one prompt are no independent draws of the benchmark, its prompts
are. Where the bootstrap has no width, with one prompt or with the same value for all, it says nothing; values inside
[0, 1] then get Wilson's interval for that many prompts, which is no narrower than theirs, as no values in [0, 1] spread
more than a 0/1 of the same mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oblr_megatron.rewards.verifier.votes import answer_classes

Array = NDArray[np.float64]

RIGHT = 1.0  # the verdict of a right answer
RESAMPLES = 4000
CHUNK = 2**22  # prompts drawn at once, over all resamples


@dataclass(frozen=True, slots=True)
class Grade:
    """One response, as far as figures need it. Example: Grade(verdict=1.0, answer="4", tokens=31, truncated=False)"""

    verdict: float  # of the main reward, unweighted
    answer: str | None  # None: none was found
    tokens: int
    truncated: bool  # cut at the limit
    reads_answers: bool = True  # whether the reward looks for an answer at all

    @property
    def right(self) -> bool:
        """Whether it earned the full reward."""
        return is_right(self.verdict)


@dataclass(frozen=True, slots=True)
class Grades:
    """A set's responses, prompt-major. Example, Q = 1, k = 2: Grades(greedy=[right], sampled=[right, wrong], k=2)"""

    greedy: Sequence[Grade]  # [Q], at least one
    sampled: Sequence[Grade]  # [Q * k]
    k: int  # may be 0

    def __post_init__(self) -> None:
        counts = f"{len(self.greedy)} greedy and {len(self.sampled)} sampled responses with k = {self.k}"
        assert self.greedy and len(self.sampled) == len(self.greedy) * self.k, counts

    @classmethod
    def of(cls, grades: Sequence[Grade], count: int, k: int) -> Grades:
        """From all greedy responses to `count` prompts, followed by all sampled ones."""
        return cls(grades[:count], grades[count:], k)

    @property
    def groups(self) -> list[Sequence[Grade]]:
        """[Q] lists of k; empty without samples."""
        return [self.sampled[first : first + self.k] for first in range(0, len(self.sampled), self.k or 1)]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95% interval. Example: Estimate(value=0.8, low=0.49, high=0.94)"""

    value: float
    low: float
    high: float


def is_right(verdict: float) -> bool:
    """Whether a response earned the full reward."""
    return verdict >= RIGHT


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Unbiased estimate for one prompt. Examples: pass_at_k(1, 4, 1) = 0.25; pass_at_k(1, 4, 4) = 1."""
    assert 0 <= right <= samples and 1 <= k <= samples, f"{right} right of {samples}, k = {k}"
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(group: Sequence[Grade]) -> float:
    """Whether the answer given most often is right; a tie counts by its share of right answers. No answer is no vote.

    Example: answers "4" (right), "5", "4" -> 1; "4", "5" -> 0.5; "5", None -> 0.
    """
    classes = answer_classes([grade.answer for grade in group], [grade.right for grade in group])
    votes = Counter(number for number in classes if number is not None)
    most = max(votes.values(), default=0)
    leading = {number for number, count in votes.items() if count == most}
    right = {number for number, grade in zip(classes, group, strict=True) if grade.right}
    return len(leading & right) / len(leading) if leading else 0.0


def powers_of_two(last: int) -> list[int]:
    """1, 2, 4, ... and `last`. Example: powers_of_two(6) = [1, 2, 4, 6]; of 0 nothing."""
    return sorted({2**power for power in range(last.bit_length())} | {last} - {0})


def by_prompt(grades: Grades) -> dict[str, Array]:
    """[Q] values of each figure: accuracy, mean@K, pass@1, pass@2, pass@4, ..., pass@K, maj@K.

    maj@K is left out when the reward reads no answers.
    """
    k, groups = grades.k, grades.groups
    columns = {"accuracy": [float(grade.right) for grade in grades.greedy]}
    if k:
        columns[f"mean@{k}"] = [math.fsum(grade.verdict for grade in group) / k for group in groups]
        right = [sum(grade.right for grade in group) for group in groups]
        columns |= {f"pass@{few}": [pass_at_k(count, k, few) for count in right] for few in powers_of_two(k)}
    if k and all(grade.reads_answers for grade in grades.sampled):
        columns[f"maj@{k}"] = [majority(group) for group in groups]
    return {name: np.array(values) for name, values in columns.items()}


def metrics(grades: Grades) -> dict[str, float]:
    """A set's figures under their names in metrics.jsonl: those of K samples, without intervals.

    Example: {"accuracy": 0.5, "mean_at_k": 0.25, "pass_at_k": 0.5, "maj_at_k": 0.5, "response_length": 31.5,
              "truncated_fraction": 0.0}
    """
    names = {"accuracy": "accuracy"} | {f"{name}@{grades.k}": f"{name}_at_k" for name in ("mean", "pass", "maj")}
    means = {names[name]: _mean(values) for name, values in by_prompt(grades).items() if name in names}
    return means | lengths(grades)


def lengths(grades: Grades) -> dict[str, float]:
    """Mean tokens, and share of responses that were cut; of the greedy and the sampled ones together."""
    responses = [*grades.greedy, *grades.sampled]
    return {
        "response_length": sum(grade.tokens for grade in responses) / len(responses),
        "truncated_fraction": sum(grade.truncated for grade in responses) / len(responses),
    }


def estimates(grades: Grades, seed: int = 0) -> dict[str, Estimate]:
    """Every figure of `by_prompt` with its interval; the same grades and seed give the same ends."""
    columns = by_prompt(grades)
    found = bootstrap_intervals(np.array([*columns.values()]), seed)
    right = int(columns["accuracy"].sum())
    ends: Mapping[str, tuple[float, float]] = dict(zip(columns, found, strict=True)) | {
        "accuracy": wilson_interval(right, len(grades.greedy))
    }
    return {name: Estimate(_mean(values), *ends[name]) for name, values in columns.items()}


def wilson_interval(right: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Score interval of a proportion (Wilson, 1927), at 95% for z = 1.96; (0, 1) when nothing was counted.

    Example: wilson_interval(8, 10) = (0.490, 0.943).
    """
    if count == 0:
        return 0.0, 1.0
    share = right / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(max(share * (1 - share), 0.0) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return min(max(low, 0.0), share), max(min(high, 1.0), share)  # rounding may carry an end past the share itself


def bootstrap_intervals(values: Array, seed: int = 0, resamples: int = RESAMPLES) -> list[tuple[float, float]]:
    """95% percentile intervals of the means of [F, Q] values, all F from the same resamples of the Q prompts."""
    metrics, prompts = values.shape
    generator = np.random.default_rng(seed)
    means = np.empty((metrics, resamples))
    step = max(1, CHUNK // prompts)
    for first in range(0, resamples, step):
        count = min(step, resamples - first)
        drawn = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=count)  # how often each prompt
        means[:, first : first + count] = values @ drawn.T / prompts
    low, high = np.percentile(means, (2.5, 97.5), axis=1)
    return [_with_width(row, float(a), float(b)) for row, a, b in zip(values, low, high, strict=True)]


def _with_width(values: Array, low: float, high: float) -> tuple[float, float]:
    """The interval; for equal values, of which the bootstrap knows no spread, Wilson's where it holds."""
    if values.min() < values.max():
        return low, high
    value = float(values[0])
    return wilson_interval(value * len(values), len(values)) if 0 <= value <= 1 else (value, value)


def _mean(values: NDArray[Any]) -> float:
    return math.fsum(values) / len(values)
