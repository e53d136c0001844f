"""Metrics against their definitions: all subsets, the interval's equation, scipy, simulated coverage.

Not covered: the scores themselves (tests/unit/rewards).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from oblr_megatron.evaluation.accuracy import (
    Estimate,
    Grade,
    Grades,
    bootstrap_intervals,
    by_prompt,
    estimates,
    majority,
    metrics,
    pass_at_k,
    powers_of_two,
    wilson_interval,
)

FIELDS: dict[str, object] = {"tokens": 10, "truncated": False, "by_value": True}


def grade(answer: str | None, score: float, **changes: object) -> Grade:
    return Grade(**(FIELDS | {"verdict": score, "answer": answer} | changes))  # type: ignore[arg-type]


def grades(greedy: Sequence[float], sampled: Sequence[Sequence[float]]) -> Grades:
    """Grades with these scores. Right answers are "4"; wrong answers are distinct."""
    numbers = itertools.count(100)

    def one(score: float) -> Grade:
        return grade("4" if score >= 1 else str(next(numbers)), score)

    return Grades([one(s) for s in greedy], [one(s) for group in sampled for s in group], len(sampled[0]))


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_average_over_all_subsets(samples: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    group = [True] * right + [False] * (samples - right)
    subsets = list(itertools.combinations(group, k))
    assert pass_at_k(right, samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_of_many_samples() -> None:
    assert pass_at_k(1, 10_000, 100) == pytest.approx(0.01, rel=1e-9)
    assert pass_at_k(10_000, 10_000, 3) == 1
    with pytest.raises(AssertionError):
        pass_at_k(1, 4, 5)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["4", "5", "4"], 1),
        (["4", "5", "5"], 0),
        (["4", "5"], 1 / 2),
        (["5", "4"], 1 / 2),
        (["5", "6", "4", "7"], 1 / 4),
        ([None, None, "4"], 1),
        ([None, None], 0),
        (["3.0", "3", "4"], 0),  # the two wrong answers are equal
        (["4", "8/2", "3", "3.0", "5"], 1 / 2),  # so are the two right answers
    ],
)
def test_majority(answers: Sequence[str | None], expected: float) -> None:
    assert majority([grade(answer, float(answer in ("4", "8/2"))) for answer in answers]) == expected


def test_answers_of_a_reward_of_texts_vote_as_texts() -> None:
    answers = ["2 1", "1, 2", "2, 1", "1 2", "1 2"]
    assert majority([grade(answer, float(answer == "1 2"), by_value=False) for answer in answers]) == 1


@given(st.lists(st.sampled_from(["4", "5", "6", None]), min_size=1, max_size=8), st.randoms())
def test_majority_is_the_mean_over_ties_and_ignores_the_order(answers: list[str | None], draw: object) -> None:
    group = [grade(answer, float(answer == "4")) for answer in answers]
    votes = [answer for answer in answers if answer is not None]
    leading = {answer for answer in votes if votes.count(answer) == max(map(votes.count, votes))}
    assert majority(group) == (("4" in leading) / len(leading) if leading else 0)
    draw.shuffle(group)  # type: ignore[attr-defined]
    assert majority(group) == (("4" in leading) / len(leading) if leading else 0)


def test_powers_of_two() -> None:
    assert [powers_of_two(last) for last in (0, 1, 2, 6, 8)] == [[], [1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@given(st.integers(1, 500), st.data())
def test_wilson_interval_solves_its_equation(count: int, data: st.DataObject) -> None:
    """At either end the observed share is z standard errors away; the ends are in [0, 1]; scipy agrees."""
    right = data.draw(st.integers(0, count))
    low, high = wilson_interval(right, count)
    assert 0 <= low <= right / count <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(right / count - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / count), abs=1e-9)
    theirs = scipy.stats.binomtest(right, count).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=1e-4)  # z is 1.95996 there


def test_wilson_interval_of_nothing() -> None:
    assert wilson_interval(0, 0) == (0, 1)
    assert wilson_interval(8, 10) == pytest.approx((0.490, 0.943), abs=5e-4)


def test_metrics_computed_by_hand() -> None:
    sampled = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0.5, 0.5, 0, 0]]
    found = grades([1, 0, 1, 0.9], sampled)
    assert metrics(found) == {
        "accuracy": 0.5,
        "mean_at_k": (0.25 + 0 + 1 + 0.25) / 4,
        "pass_at_k": 0.5,
        "maj_at_k": (1 / 4 + 0 + 1 + 0) / 4,
        "response_length": 10,
        "truncated_fraction": 0,
        "unscored": 0,
    }
    columns = by_prompt(found)
    assert [*columns] == ["accuracy", "mean@4", "pass@1", "pass@2", "pass@4", "maj@4"]
    assert columns["pass@1"].tolist() == [0.25, 0, 1, 0] and columns["pass@2"].tolist() == [0.5, 0, 1, 0]


def test_lengths_include_greedy_and_sampled_responses() -> None:
    greedy = [grade("4", 1.0, tokens=3, truncated=True)]
    sampled = [grade("4", 1.0, tokens=5), grade(None, 0.0, tokens=10, truncated=True)]
    found = metrics(Grades(greedy, sampled, 2))
    assert (found["response_length"], found["truncated_fraction"]) == (6, pytest.approx(2 / 3))


def test_without_samples_there_are_only_greedy_metrics() -> None:
    found = Grades([grade("4", 1.0), grade("5", 0.0)], [], 0)
    assert [*metrics(found)] == ["accuracy", "response_length", "truncated_fraction", "unscored"]
    assert [*estimates(found)] == ["accuracy"]


def test_no_majority_if_the_reward_extracts_no_answers() -> None:
    sampled = [grade(None, 1.0, reads_answers=False)] * 2
    assert "maj_at_k" not in metrics(Grades([grade("4", 1.0)], sampled, 2))


def test_inconsistent_counts_are_an_error() -> None:
    with pytest.raises(AssertionError, match="1 greedy and 1 sampled responses with k = 2"):
        Grades([grade("4", 1.0)], [grade("4", 1.0)], 2)


def test_bootstrap_agrees_with_scipy() -> None:
    values = np.random.default_rng(0).beta(0.3, 0.5, size=(2, 150))
    for row, (low, high) in zip(values, bootstrap_intervals(values, seed=1), strict=True):
        theirs = scipy.stats.bootstrap((row,), np.mean, method="percentile", n_resamples=20_000, rng=2)
        error = row.std() / math.sqrt(len(row))
        assert abs(low - theirs.confidence_interval.low) < 0.15 * error
        assert abs(high - theirs.confidence_interval.high) < 0.15 * error


def test_bootstrap_coverage() -> None:
    """400 sets of 100 prompts with known mean: about 95% of the intervals contain it."""
    draw = np.random.default_rng(3)
    values = draw.binomial(8, draw.beta(1, 1, size=(400, 100))) / 8
    covered = [low <= 0.5 <= high for low, high in bootstrap_intervals(values)]
    assert 0.91 < sum(covered) / 400 < 0.98


def test_bootstrap_is_repeatable_and_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random((3, 50))
    whole = bootstrap_intervals(values)
    assert bootstrap_intervals(values) == whole != bootstrap_intervals(values, seed=1)
    monkeypatch.setattr("oblr_megatron.evaluation.accuracy.CHUNK", 170)  # three resamples at a time
    assert bootstrap_intervals(values) == [pytest.approx(ends, abs=1e-12) for ends in whole]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.25], wilson_interval(0.25, 1)),
        ([0.0] * 30, wilson_interval(0, 30)),
        ([1.0] * 30, wilson_interval(30, 30)),
        ([1.0], wilson_interval(1, 1)),
        ([-2.5] * 3, (-2.5, -2.5)),  # outside of [0, 1]
        ([0.0, *[1.0] * 29], wilson_interval(29, 30)),  # a proportion: the bootstrap's would not hold 0.89
    ],
)
def test_the_interval_of_proportions_and_of_equal_values_is_wilsons(
    values: list[float], expected: tuple[float, float]
) -> None:
    assert bootstrap_intervals(np.array([values])) == [pytest.approx(expected)]


def test_every_metric_is_inside_its_interval() -> None:
    sampled = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0.5, 0.5, 0, 0]]
    found = estimates(grades([1, 0, 1, 0.9], sampled))
    assert all(one.low <= one.value <= one.high for one in found.values())
    assert found["accuracy"] == Estimate(0.5, *wilson_interval(2, 4))
    assert found["pass@4"].low < 0.5 < found["pass@4"].high
