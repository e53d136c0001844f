"""Weighted sums of rewards, and the rewards "format" and "overlong".

Not covered: the metrics of the terms (tests/unit/test_run.py), ranks (tests/distributed/test_shared_reward.py).
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from oblr_megatron.config import RewardConfig
from oblr_megatron.errors import UserError
from oblr_megatron.rewards.base import Reward, RewardResult
from oblr_megatron.rewards.combined import CombinedReward, Term
from oblr_megatron.rewards.format import keeps_to_box
from oblr_megatron.rewards.overlong import punishment
from oblr_megatron.rewards.registry import build_reward, check_reward
from oblr_megatron.types import Sample
from tests.unit.processes.conftest import unhurried
from tests.unit.rewards.conftest import batch

SCORERS = "tests.unit.processes.scorers"
LIMIT = 100


def build(**values: object) -> Reward:
    return build_reward(RewardConfig.model_validate(values), max_response_tokens=LIMIT)


def of_length(length: int, text: str = "", *, cut: bool = False) -> Sample:
    return Sample(0, (0,), (1,) * length, (0.0,) * length, text, "length" if cut else "stop", 0)


def test_the_sum_is_weighted_and_the_terms_are_unweighted() -> None:
    terms = [{"name": "format", "weight": 0.25}, {"name": "overlong", "weight": 0.5}]
    prompts, samples = batch([("4", [r"\boxed{4}", r"\boxed{5}", "4", r"\boxed{4} \boxed{4}"])])
    samples[0] = replace(samples[0], response_ids=(1,) * 95, logprobs=(0.0,) * 95)
    with build(name="math", weight=2.0, terms=terms, overlong_buffer_tokens=20) as reward:
        result = reward.score(prompts, samples)
    assert result.terms == {"math": [1, 0, 0, 1], "format": [1, 1, 0, 0], "overlong": [-0.75, 0, 0, 0]}
    assert list(result.terms) == ["math", "format", "overlong"]
    assert result.rewards == [2 + 0.25 - 0.375, 0.25, 0, 2]
    assert result.main_rewards == [1, 0, 0, 1], "unweighted"


def test_a_single_reward_is_a_sum_only_if_it_has_a_weight() -> None:
    rows = batch([("4", ["4", "5"])])
    with build(name="exact_match") as plain, build(name="exact_match", weight=-3) as weighted:
        assert plain.score(*rows) == RewardResult([1, 0], answers=["4", "5"])
        result = weighted.score(*rows)
        assert (result.rewards, result.main_rewards, result.terms) == ([-3, 0], [1, 0], {"exact_match": [1, 0]})


def test_a_failing_term_counts_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch, "sleep")
    responses = ["fine", "raise", "sleep", "nan"]
    terms = [{"name": f"{SCORERS}:mixed", "weight": 10}, {"name": f"{SCORERS}:mixed_too", "weight": 100}]
    with build(name="exact_match", terms=terms, timeout_s=1.0) as reward:
        result = reward.score(*batch([("nan", responses)]))
    assert result.rewards == [110, 100, 0, 1]
    assert result.faults == {1: "failed", 2: "late", 3: "failed"}, "of the first faulty term"
    assert (result.failures, result.timeouts) == (2, 1)
    assert result.unscored == set(), "the main term has a value"
    assert (result.error or "").startswith(f"{SCORERS}:mixed: Traceback")


class Answering(Reward):
    """The answer is one letter of the response; counts calls of `close`."""

    def __init__(self, place: int) -> None:
        self.place, self.closed = place, 0

    def score(self, prompts: object, samples: object) -> RewardResult:
        assert isinstance(samples, list)
        return RewardResult([1.0] * len(samples), answers=[sample.text[self.place :][:1] or None for sample in samples])

    def longest_s(self, count: int) -> float:
        return 2.0 * count

    def close(self) -> None:
        self.closed += 1


def test_answers_are_those_of_the_main_reward() -> None:
    first, second = Answering(0), Answering(1)
    with CombinedReward([Term("a", 1.0, first), Term("b", 2.0, second)]) as reward:
        assert reward.score(*batch([("", ["xy", ""])])).answers == ["x", None]
        assert reward.longest_s(3) == 12.0
    assert first.closed == second.closed == 1


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (r"so \boxed{4}.", True), (r"\boxed{\frac{1}{2}} holds", True), (r"\boxed {4}", True), ("4", False),
        ("", False), (r"\boxed{4", False), (r"\boxed{4} and \boxed{5", True), (r"\boxed{4} or \boxed{5}", False),
        (r"\boxed{\boxed{4}}", False), (r"\boxed{}", False), (r"\boxed4", False), (r"\boxedx{4}", False),
        (r"\boxed{" * 10_000, False),
    ],
)  # fmt: skip
def test_the_format_is_one_complete_box(text: str, kept: bool) -> None:
    assert keeps_to_box(of_length(1, text)) is kept
    assert not keeps_to_box(of_length(1, text, cut=True)), "a truncated response did not end by itself"


def test_a_pattern_matches_the_whole_response() -> None:
    pairs = [("a\nb", "4"), ("a", ""), ("", "44"), ("", "4!")]
    responses = [*(f"<think>{thought}</think>{answer}" for thought, answer in pairs), "x<think>a</think>4"]
    with build(name="format", format_pattern="<think>.*</think>[0-9]+") as reward:
        assert reward.score(*batch([("", responses)])).rewards == [1, 0, 1, 0, 0]


def test_a_pattern_that_takes_too_long_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch, "a" * 64)
    with build(name="format", format_pattern="(a+)+b", timeout_s=0.5, num_workers=1) as reward:
        result = reward.score(*batch([("", ["aab", "a" * 64, "b"])]))
    assert (result.rewards, result.faults) == ([1, 0, 0], {1: "late"})


@pytest.mark.parametrize("length", [0, 1, 79, 80, 81, 85, 99, 100, 101, 130])
def test_overlong_is_dapos_equation(length: int) -> None:
    """arXiv 2503.14476, equation 13."""
    longest, cache = 100, 20
    if length <= longest - cache:
        wanted = Fraction(0)
    elif length <= longest:
        wanted = Fraction((longest - cache) - length, cache)
    else:
        wanted = Fraction(-1)
    assert punishment(length, longest, cache) == pytest.approx(float(wanted), abs=1e-15)
    assert str(punishment(length, longest, cache)) != "-0.0"


def test_a_truncated_response_gets_minus_one() -> None:
    prompts, _ = batch([("", [])])
    with build(name="overlong", overlong_buffer_tokens=LIMIT) as reward:
        result = reward.score(prompts, [of_length(LIMIT, cut=True), of_length(LIMIT), of_length(1)])
    assert result.rewards == [-1, -1, -0.01]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"terms": [{"name": "math"}]}, "'math'"),
        ({"terms": [{"name": "format"}, {"name": "format"}]}, "'format'"),
        ({"terms": [{"name": "no_such"}]}, "'no_such' [config: reward.terms]"),
        ({"terms": [{"name": f"{SCORERS}:by_position"}]}, "[config: reward.terms]"),
        ({"name": "overlong"}, "overlong_buffer_tokens 0 is not between 1 and rollout.max_response_tokens 100"),
        ({"terms": [{"name": "overlong"}], "overlong_buffer_tokens": 101}, "overlong_buffer_tokens 101"),
        ({"name": "format", "format_pattern": "(a"}, "missing ), unterminated subpattern"),
        ({"name": "format", "format_pattern": "(" * 100_000}, "[config: reward.format_pattern]"),
        ({"name": "format", "format_pattern": "a{99999999999}"}, "[config: reward.format_pattern]"),
    ],
)
def test_errors_in_the_config(values: dict[str, object], named: str) -> None:
    with pytest.raises(UserError) as caught:
        check_reward(RewardConfig.model_validate(values), max_response_tokens=LIMIT)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_options_of_unused_rewards_are_not_checked() -> None:
    check_reward(RewardConfig(overlong_buffer_tokens=101, api_key_env="NO_SUCH"), max_response_tokens=LIMIT)
