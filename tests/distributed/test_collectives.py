"""All ranks decide by the same values: they get the same values or the same error, and none waits past its deadline.

Not covered: engines (tests/e2e/test_recovery.py), NCCL.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oblr_megatron.errors import (
    DamagedError,
    DeadlineError,
    EngineDeadlineError,
    EngineLostError,
    RunError,
    UnwrittenError,
)
from oblr_megatron.runtime import collectives
from oblr_megatron.runtime.collectives import Collectives, attempt, raise_on_all
from tests.distributed.launch import run_ranks

RANKS = 3
FAILURES: dict[str, list[BaseException | None]] = {  # by rank
    "none": [None, None, None],
    "a loss": [None, EngineDeadlineError("rank 1", "engine 1 to start", 5.0), None],
    "damage and a loss": [DamagedError("a bucket"), None, EngineLostError("engine 2 died")],
    "damage": [None, DamagedError("a bucket"), None],
    "a loss and a refusal": [EngineLostError("engine 0 died"), None, RunError("no")],
    "samples": [UnwrittenError("the disk is full"), None, None],
    "a loss and a bug": [EngineLostError("engine 0 died"), ZeroDivisionError("a bug"), None],
}
KINDS = {
    "none": [None] * 3,
    "a loss": [EngineLostError, EngineDeadlineError, EngineLostError],
    "damage and a loss": [EngineLostError] * 3,
    "damage": [DamagedError] * 3,
    "a loss and a refusal": [RunError] * 3,
    "samples": [UnwrittenError] * 3,
    "a loss and a bug": [RunError, ZeroDivisionError, RunError],
}


def on_rank() -> dict[str, Any]:
    """By case: (values that arrived, type of what was raised)."""
    rank = dist.get_rank()
    exchange = Collectives(rank)
    return {name: one_case(exchange, rank, failures[rank]) for name, failures in FAILURES.items()}


def one_case(exchange: Collectives, rank: int, failure: BaseException | None) -> tuple[list[Any], type | None]:
    def call() -> str:
        if failure is not None:
            raise failure
        return "x" * (10**rank)  # of another length on every rank

    own = attempt(call)
    outcomes = exchange.gather(own, what="a case", seconds=60)
    alone = nullcontext() if failure is None else pytest.raises(type(failure))
    with alone:
        raise_on_all(own, None)
    try:
        raise_on_all(own, dist.group.WORLD)
    except Exception as error:  # noqa: BLE001  whatever it is, the test wants to know
        assert getattr(error, "raised_on_all_ranks", False), "the ranks go on alike, and save the state"
        return [outcome.value for outcome in outcomes], type(error)
    return [outcome.value for outcome in outcomes], None


def test_every_rank_gets_all_values_and_decides_alike() -> None:
    answers = run_ranks(on_rank, RANKS)
    for name, failures in FAILURES.items():
        values = [None if failure else "x" * 10**rank for rank, failure in enumerate(failures)]
        assert [answer[name] for answer in answers] == [(values, kind) for kind in KINDS[name]], name


UNEVEN = {  # lengths of the values by rank, and the ranks that broadcast theirs
    "one has all": ([1_000_000, 10, 10], [0]),
    "similar": ([900_000, 1_000_000, 800_000], []),
    "short": ([50_000, 10, 10], []),
    "two have all": ([10, 2_000_000, 1_500_000, 10, 10, 10], [1, 2]),
}


def uneven(lengths: list[int]) -> tuple[list[int], int]:
    """Lengths that arrived, and the most bytes that were gathered from a rank."""
    exchange, gathered = Collectives(dist.get_rank()), [0]
    all_gather = exchange._all_gather

    def counted(results: list[torch.Tensor], own: torch.Tensor, what: str, seconds: float) -> None:
        gathered[0] = max(gathered[0], own.nbytes)
        all_gather(results, own, what, seconds)

    exchange._all_gather = counted  # type: ignore[method-assign]
    values = exchange.objects("x" * lengths[dist.get_rank()], what="a case", seconds=60)
    assert all(value == "x" * len(value) for value in values)
    return [len(value) for value in values], gathered[0]


@pytest.mark.parametrize("case", UNEVEN)
def test_a_value_that_one_rank_has_is_not_padded_on_the_others(case: str) -> None:
    lengths, broadcast = UNEVEN[case]
    for found, gathered in run_ranks(uneven, len(lengths), lengths):
        assert found == lengths
        rest = [length for rank, length in enumerate(lengths) if rank not in broadcast]
        assert gathered < max(rest) + 100


def late() -> tuple[list[str], str]:
    """Rank 0 waits for rank 1, which comes once rank 0 has said so, and then not before rank 0 has given up."""
    exchange, store = Collectives(dist.get_rank()), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["said"], timedelta(seconds=60))
        exchange.gather(attempt(lambda: 1), what="32 samples", seconds=60)
        store.wait(["given up"], timedelta(seconds=60))
        return [], ""
    said: list[str] = []

    def note(form: str, *values: object) -> None:
        said.append(form % values)
        store.set("said", "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "SILENT_S", 0.1)
        patch.setattr(collectives.logger, "warning", note)
        outcomes = exchange.gather(attempt(lambda: 0), what="32 samples", seconds=60)
        assert [outcome.value for outcome in outcomes] == [0, 1]
        with pytest.raises(DeadlineError) as error:
            exchange.gather(attempt(lambda: 0), what="64 samples", seconds=1)
    store.set("given up", "")
    return said, str(error.value)


def test_a_long_wait_is_announced_and_ends_by_its_deadline() -> None:
    (said, message), _ = run_ranks(late, 2)
    assert said == [
        "rank 0 has waited 0 s for the other ranks and 32 samples; it gives up after 60 s",
        "rank 0 has waited 0 s for the other ranks and 64 samples; it gives up after 1 s",
    ]
    assert message == "rank 0 waited 1 s for the other ranks and 64 samples and gave up"


def test_one_rank_alone_hears_itself() -> None:
    exchange = Collectives(0)
    assert exchange.gather(attempt(lambda: 3), what="a case", seconds=0)[0].value == 3
    assert exchange.objects("any", what="a case", seconds=0) == ["any"]
