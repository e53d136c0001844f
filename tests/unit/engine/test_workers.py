"""Several workers of which one fails: all have answered when the error is raised, and the next call is in step.

`Executor` has a queue of answers for each worker and vLLM's own loop over them (vllm.v1.executor.multiproc_executor),
without processes. Not covered: vLLM's real workers (tests/e2e/test_push.py has one), several GPUs.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from oblr_megatron.engine.workers import WorkerError, WorkerRefusal, call_workers
from oblr_megatron.errors import DamagedError


class Worker:
    def __init__(self, rank: int, broken: tuple[int, ...]) -> None:
        self.rank, self.broken, self.loaded = rank, rank in broken, list[str]()

    def update(self, bucket: str) -> str:
        if self.broken:
            raise DamagedError(f"{bucket} is damaged on rank {self.rank}")
        self.loaded.append(bucket)
        return f"{bucket} on {self.rank}"

    def silent(self) -> None:
        raise AssertionError


class Executor:
    def __init__(self, *broken: int) -> None:
        self.workers = [Worker(rank, broken) for rank in range(3)]
        self.answers: list[deque[tuple[bool, Any]]] = [deque() for _ in self.workers]

    def collective_rpc(self, method: str | Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        for worker, answers in zip(self.workers, self.answers, strict=True):
            function = getattr(worker, method) if isinstance(method, str) else None
            try:
                value = function(*args) if function else pickle.loads(pickle.dumps(method))(worker, *args)
                answers.append((True, value))
            except Exception as error:  # noqa: BLE001  as vLLM's worker
                answers.append((False, error))
        values = []
        for answers in self.answers:
            fine, value = answers.popleft()
            if not fine:
                raise RuntimeError(f"Worker failed with error '{value}'")
            values.append(value)
        return values


def test_results_are_in_the_order_of_the_workers() -> None:
    executor = Executor()
    assert call_workers(executor, "update", bucket="a") == ["a on 0", "a on 1", "a on 2"]


@pytest.mark.parametrize("broken", [(0,), (1,), (0, 2)])
def test_an_error_of_some_workers_leaves_no_answer_behind(broken: tuple[int, ...]) -> None:
    executor = Executor(*broken)
    with pytest.raises(WorkerRefusal, match=f"^a is damaged on rank {broken[0]}$"):
        call_workers(executor, "update", bucket="a")
    assert not any(executor.answers) and [worker.loaded for worker in executor.workers if not worker.broken] == [
        ["a"] for _ in range(3 - len(broken))
    ]
    for worker in executor.workers:
        worker.broken = False
    assert call_workers(executor, "update", bucket="b") == ["b on 0", "b on 1", "b on 2"]


def test_a_call_by_name_alone_would_leave_answers() -> None:
    """Otherwise the test above could not fail."""
    executor = Executor(0)
    with pytest.raises(RuntimeError, match="Worker failed"):
        executor.collective_rpc("update", ("a",))
    assert any(executor.answers)


def test_an_error_without_a_text_has_its_name() -> None:
    with pytest.raises(WorkerError, match=r"^AssertionError$") as raised:
        call_workers(Executor(), "silent")
    assert not isinstance(raised.value, WorkerRefusal)


def test_a_worker_that_is_broken_counts_more_than_one_that_refuses() -> None:
    executor = Executor(0)
    executor.workers[2].loaded = None  # type: ignore[assignment]
    with pytest.raises(WorkerError, match="NoneType") as raised:
        call_workers(executor, "update", bucket="a")
    assert not isinstance(raised.value, WorkerRefusal)
