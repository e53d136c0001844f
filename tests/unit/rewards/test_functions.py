"""User reward functions that are async or take many responses: values, batches, failures.

Not covered: plain functions of one response (test_registry.py, test_pool.py), programs that a function starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from oblr_megatron.config import RewardConfig
from oblr_megatron.errors import UserError
from oblr_megatron.processes.calls import BATCH, SINGLE, FunctionKind, kind_of
from oblr_megatron.rewards.base import Reward, RewardResult
from oblr_megatron.rewards.registry import build_reward, takes_rows
from tests.unit.processes import scorers, scorers_many
from tests.unit.processes.conftest import unhurried
from tests.unit.rewards.conftest import batch

MANY = "tests.unit.processes.scorers_many"


@pytest.fixture(autouse=True)
def only_calls_that_hang_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late async calls are not among these: the worker itself answers for them."""
    unhurried(monkeypatch, "sleep", "spin", "block")


def score_batch(name: str, *groups: list[str], **options: object) -> RewardResult:
    """The result for one group of responses per prompt."""
    config = RewardConfig.model_validate({"name": f"{MANY}:{name}", "num_workers": 1, **options})
    with build_reward(config, max_response_tokens=16) as reward:
        return reward.score(*batch([("gold", group) for group in groups]))


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[..., RewardResult]]:
    """`score_batch` with functions that stay loaded: what a call does to its worker, the next call must not notice."""
    with ExitStack() as stack:

        @cache
        def built(name: str) -> Reward:
            config = RewardConfig.model_validate({"name": f"{MANY}:{name}", "num_workers": 1, "batch_size": 2})
            return stack.enter_context(build_reward(config, max_response_tokens=16))

        yield lambda name, *groups: built(name).score(*batch([("gold", group) for group in groups]))


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (scorers.mixed, FunctionKind(batch=False, awaited=False, parameters=SINGLE[:3])),
        (scorers_many.slow, FunctionKind(batch=False, awaited=True, parameters=SINGLE[:3])),
        (scorers_many.an_object, FunctionKind(batch=False, awaited=True, parameters=SINGLE[:3])),
        (scorers_many.sizes, FunctionKind(batch=True, awaited=False, parameters=BATCH[:3])),
        (scorers_many.together, FunctionKind(batch=True, awaited=True, parameters=BATCH[:3])),
        (scorers_many.by_level, FunctionKind(batch=False, awaited=False, parameters=SINGLE)),
        (scorers_many.by_level_async, FunctionKind(batch=False, awaited=True, parameters=SINGLE)),
        (scorers_many.by_levels, FunctionKind(batch=True, awaited=False, parameters=BATCH)),
        (scorers_many.with_an_option, FunctionKind(batch=False, awaited=False, parameters=SINGLE[:3])),
        (min, FunctionKind(batch=False, awaited=False)),
    ],
)
def test_kinds_of_functions(function: object, kind: FunctionKind) -> None:
    assert callable(function) and kind_of(function) == kind


def test_async_calls_of_a_request_run_at_once() -> None:
    groups = list("abcd"), list("efgh")
    assert score_batch("overlap", *groups, batch_size=8).rewards == [8.0] * 8, "all began before one ended"
    assert score_batch("overlap", *groups, batch_size=1).rewards == [4.0] * 4 + [8.0] * 4, "two requests"


def test_async_objects_and_wrapped_coroutines() -> None:
    assert score_batch("an_object", ["a", "b"]).rewards == [0.5, 0.5]
    assert score_batch("returns_a_coroutine", ["fine", "raise", "fine"]).rewards == [1, 0, 1]
    assert score_batch("returns_a_coroutine_of_many", ["fine", "fine"]).rewards == [1, 1]


@pytest.mark.parametrize("name", ["by_level", "by_level_async", "by_levels"])
def test_a_function_may_take_the_columns_of_the_row(name: str) -> None:
    result = score_batch(name, ["a", "b"], ["c", "d"], batch_size=2)
    assert (result.rewards, result.error) == ([1, 1, 2, 2], None)


def test_a_fourth_parameter_of_another_name_keeps_its_default() -> None:
    assert score_batch("with_an_option", ["a"]).rewards == [2]


def test_which_rewards_need_the_columns_of_the_rows() -> None:
    def needs(name: str, **options: object) -> bool:
        return takes_rows(RewardConfig.model_validate({"name": name, **options}))

    assert needs(f"{MANY}:by_levels") and not needs(f"{MANY}:sizes") and not needs("math:gsm8k")
    assert needs("math", terms=[{"name": f"{MANY}:by_level"}])
    assert needs("http://localhost:1/", send_rows=True) and not needs("http://localhost:1/")
    assert not needs("math", send_rows=True)
    with pytest.raises(UserError):
        needs("no_such_module:function")


@pytest.mark.parametrize("late", ["late", "stubborn"])
def test_a_late_async_call_affects_no_other_call(late: str) -> None:
    result = score_batch("slow", ["fine", late, "fine", "raise"], ["fine"] * 4, timeout_s=0.5, batch_size=4)
    assert result.rewards == [1, 0, 1, 0, 1, 1, 1, 1]
    assert result.faults == {1: "late", 3: "failed"}
    assert (result.failures, result.timeouts) == (1, 1)


def test_a_late_call_does_not_run_into_the_next_request() -> None:
    result = score_batch("process", ["a", "late"], ["b", "c"], ["d", "e"], timeout_s=0.5, batch_size=2)
    first, _, second, third, *others = result.rewards
    assert first != second == third == others[0] == others[1], "its worker was replaced once"


@pytest.mark.parametrize("response", ["raise", "exit", "cancels", "nan", "text", "none"])
def test_a_failing_async_call_affects_no_other_call(response: str, shared: Callable[..., RewardResult]) -> None:
    result = shared("slow", ["fine", response, "fine"])
    assert (result.rewards, result.faults) == ([1, 0, 1], {1: "failed"})


@pytest.mark.parametrize(
    ("response", "fault"),
    [("sleep", "late"), ("spin", "late"), ("die", "failed"), ("crash", "failed"), ("stray exit", "failed")],
)
def test_a_call_that_stops_the_worker_fails_the_whole_request(response: str, fault: str) -> None:
    """The call blocks the event loop or ends the process."""
    result = score_batch("slow", ["fine", response], ["fine", "fine"], timeout_s=0.5, batch_size=2)
    assert result.rewards == [0, 0, 1, 1]
    assert result.faults == {0: fault, 1: fault}


def test_the_memory_limit_fails_only_one_call() -> None:
    assert score_batch("slow", ["fine", "memory", "fine"]).faults == {1: "failed"}


def test_an_async_generator_is_not_a_number() -> None:
    result = score_batch("async_generator", ["a"])
    assert result.failures == 1 and "not a finite number" in (result.error or "")


def test_batches_consist_of_whole_groups() -> None:
    groups = [["a", "b", "c"]] * 5
    assert score_batch("sizes", *groups, batch_size=4).rewards == [6.0] * 12 + [3.0] * 3
    assert score_batch("sizes", *groups, batch_size=1).rewards == [3.0] * 15
    assert score_batch("sizes", *groups, batch_size=100, num_workers=3).rewards == [15.0] * 15


def test_a_batch_function_gets_the_whole_group() -> None:
    assert score_batch("best_of", ["a", "bb", "c"], ["dd", "d", "dd"], batch_size=1).rewards == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("response", ["numpy", "tuple", "generator"])
def test_a_batch_function_may_return_any_sequence(response: str, shared: Callable[..., RewardResult]) -> None:
    assert shared("many", [response, "fine"]).rewards == [1, 1]


@pytest.mark.parametrize("name", ["many", "together"])
def test_a_value_that_is_not_a_number_fails_only_its_sample(name: str, shared: Callable[..., RewardResult]) -> None:
    result = shared(name, ["holes", "a", "b", "c", "d", "e"])
    assert (result.rewards, result.failures) == ([0, 0, 0, 0, 1, 1], 4)
    assert "None is not a finite number" in (result.error or "")


@pytest.mark.parametrize(
    ("response", "named"),
    [
        ("short", "1 values for 2 responses"),
        ("long", "3 values for 2 responses"),
        ("number", "returned 3.0"),
        ("string", "returned '11'"),
        ("table", "returned {0: 1.0"),
        ("nothing", "returned None"),
        ("bad text", "no text of this"),
        ("raise", "no such answer"),
        ("exit", "SystemExit"),
        ("memory", "memory limit"),
        ("die", "died"),
        ("crash", "died"),
    ],
)
def test_a_failing_batch_affects_no_other_batch(response: str, named: str, shared: Callable[..., RewardResult]) -> None:
    result = shared("many", [response, "fine"], ["fine", "fine"])
    assert result.rewards == [0, 0, 1, 1]
    assert result.faults == {0: "failed", 1: "failed"}
    assert named in (result.error or "")


@pytest.mark.parametrize(
    ("name", "response"), [("many", "sleep"), ("many", "spin"), ("together", "late"), ("together", "block")]
)
def test_a_late_batch_affects_no_other_batch(name: str, response: str) -> None:
    result = score_batch(name, [response, "fine"], ["fine", "fine"], batch_size=2, timeout_s=0.5)
    assert (result.rewards, result.faults) == ([0, 0, 1, 1], {0: "late", 1: "late"})


def test_the_batch_functions_have_the_kinds_under_test() -> None:
    assert inspect.iscoroutinefunction(scorers_many.together) and not inspect.iscoroutinefunction(scorers_many.many)
