"""A reward that fails for every response ends the run after a few steps.

Not covered: a whole run (tests/e2e/test_train.py).
"""

from __future__ import annotations

import pytest

from oblr_megatron.config import RewardConfig
from oblr_megatron.errors import RunError
from oblr_megatron.rewards.base import RewardResult
from oblr_megatron.rewards.combined import CombinedReward, Term
from oblr_megatron.rewards.registry import build_reward
from oblr_megatron.rewards.shared import FailedSteps, NoRewardError
from tests.unit.rewards.conftest import batch

SCORERS = "tests.unit.processes.scorers"
FINE = RewardResult([1.0, 0.0])
ONE_FAILED = RewardResult([1.0, 0.0], {1: "failed"}, error="ValueError: no number")
ALL_FAILED = RewardResult([0.0, 0.0], {0: "failed", 1: "late"}, error="ValueError: no number")
ALL_LATE = RewardResult([0.0, 0.0], {0: "late", 1: "late"})


def steps(limit: int) -> FailedSteps:
    return FailedSteps(RewardConfig(max_failed_steps=limit, timeout_s=2.5))


@pytest.mark.parametrize(("result", "cause"), [(ALL_FAILED, "ValueError: no number"), (ALL_LATE, "reward.timeout_s")])
def test_a_reward_that_never_worked_ends_the_run_with_the_cause(result: RewardResult, cause: str) -> None:
    failed = steps(3)
    failed.count([result])
    failed.count([result, result])  # two batches of dynamic sampling
    with pytest.raises(RunError) as caught:
        failed.count([result])
    assert not isinstance(caught.value, NoRewardError), "there is nothing to save"
    assert cause in str(caught.value) and " 3 steps" in str(caught.value) and "\n" not in str(caught.value)


def test_faults_without_an_error_are_late_only_if_all_are() -> None:
    with pytest.raises(RunError) as caught:
        steps(1).count([RewardResult([0.0, 0.0], {0: "failed", 1: "late"})])
    assert "see the run's log" in str(caught.value) and "timeout_s" not in str(caught.value)


def test_one_response_with_a_reward_starts_the_count_again() -> None:
    failed = steps(2)
    for results in ([ALL_FAILED], [ONE_FAILED], [ALL_LATE], [ALL_FAILED, FINE], [ALL_FAILED]):
        failed.count(results)
    with pytest.raises(NoRewardError):
        failed.count([ALL_LATE])


def test_zero_never_ends_the_run() -> None:
    failed = steps(0)
    for _ in range(10):
        failed.count([ALL_FAILED])


def test_the_cause_is_the_last_line_of_a_traceback() -> None:
    def cause(error: str | None) -> str:
        return RewardResult([0.0], {0: "failed"}, error=error).cause

    trace = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    return 1 / 0\nZeroDivisionError: by 0'
    assert cause(trace) == "ZeroDivisionError: by 0"
    assert cause(f"judge:near: {trace}") == "judge:near: ZeroDivisionError: by 0"
    assert cause("http://a/ answered with status 500: 'no'") == "http://a/ answered with status 500: 'no'"
    assert cause(trace[40:]) == "ZeroDivisionError: by 0", "long tracebacks lose their beginning"
    assert cause(None) == "" and len(cause("x" * 5000)) <= 300


def test_the_cause_of_a_real_failure() -> None:
    main = build_reward(RewardConfig(name=f"{SCORERS}:mixed", num_workers=1), max_response_tokens=16)
    with CombinedReward([Term("mixed", 0.5, main)]) as reward:
        assert reward.score(*batch([("", ["raise", "raise"])])).cause == "mixed: ValueError: no such answer"
