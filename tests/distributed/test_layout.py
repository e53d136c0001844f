"""Ranks and groups of a layout; the launcher of these tests reports failures of its ranks.

Not covered: NCCL, several nodes.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import pytest
import torch
import torch.distributed as dist

from oblr_megatron.config import ParallelConfig
from oblr_megatron.errors import DeadlineError, UserError
from oblr_megatron.model import cpu
from oblr_megatron.model.parallel import (
    checked_rendezvous,
    end_process,
    initialize,
    leave,
    rank_from_environment,
    shutdown,
)
from oblr_megatron.runtime.collectives import Collectives, Outcome
from tests.distributed.launch import RankError, layout, run_ranks
from tests.ports import free_port


def describe(tp: int, pp: int) -> dict[str, object]:
    with layout(tp=tp, pp=pp) as parallel:
        ranks = dist.get_process_group_ranks
        embedding = parallel.embedding_group
        return {
            "place": (parallel.tp_rank, parallel.pp_rank, parallel.dp_rank),
            "sizes": (parallel.tp_size, parallel.pp_size, parallel.dp_size),
            "groups": (ranks(parallel.tp_group), ranks(parallel.pp_group), ranks(parallel.dp_group)),
            "model": ranks(parallel.model_group),
            "embedding": ranks(embedding) if embedding is not None else None,
            "stages": (parallel.is_first_stage, parallel.is_last_stage),
        }


def test_tensor_ranks_are_neighbours_then_data_then_pipeline() -> None:
    """4 ranks as TP2 x PP2: stage 0 is ranks 0 and 1, stage 1 is ranks 2 and 3."""
    rank3 = run_ranks(describe, 4, 2, 2)[3]
    assert rank3 == {
        "place": (1, 1, 0),
        "sizes": (2, 2, 1),
        "groups": ([2, 3], [1, 3], [3]),
        "model": [0, 1, 2, 3],
        "embedding": [1, 3],
        "stages": (False, True),
    }


def test_a_middle_stage_is_in_no_embedding_group() -> None:
    embedding = [rank["embedding"] for rank in run_ranks(describe, 3, 1, 3)]
    assert embedding == [[0, 2], None, [0, 2]]


def test_data_parallelism_is_what_is_left() -> None:
    places = [rank["place"] for rank in run_ranks(describe, 4, 2, 1)]
    assert places == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]


def deadlines(seconds: float) -> set[float]:
    """Timeouts of the groups of a layout, in seconds."""
    initialize(ParallelConfig(tensor_model_parallel_size=2, distributed_timeout_s=seconds))
    world = dist.distributed_c10d._world
    groups = [group for group in world.pg_map if group is not world.default_pg]
    found = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
    shutdown(keep_process_group=True)
    return found


def test_every_group_has_the_deadline_of_the_config() -> None:
    """megatron-core takes minutes."""
    assert run_ranks(deadlines, 2, 75.5) == [{75.5}] * 2


def test_one_process_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_rng_state()
    try:
        parallel = initialize(ParallelConfig(), seed=7)
        assert (parallel.rank, parallel.world_size, parallel.tp_size, parallel.dp_size) == (0, 1, 1, 1)
        assert parallel.is_first_stage
        assert parallel.is_last_stage
        assert torch.equal(torch.get_rng_state(), before)
    finally:
        shutdown()
        cpu.uninstall()
    assert not dist.is_initialized()
    shutdown()  # a second time does nothing


@pytest.mark.parametrize(
    ("backend", "error", "destroyed"),
    [("nccl", RuntimeError("out of memory"), 0), ("nccl", None, 1), ("gloo", RuntimeError("lost a rank"), 1)],
)
def test_a_rank_that_raised_does_not_wait_in_nccls_shutdown(
    backend: str, error: RuntimeError | None, destroyed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(None))
    with suppress(RuntimeError), ExitStack() as stack:
        stack.push(leave)
        if error is not None:
            raise error
    assert len(calls) == destroyed


@pytest.mark.parametrize(("joined", "status"), [(True, 1), (False, 7)])
def test_a_rank_in_a_group_ends_without_pythons_teardown(joined: bool, status: int) -> None:
    assert run_ends(joined) == status


def run_ends(joined: bool) -> int:
    """Exit status of a forked rank. Its main function raises; its teardown would hang if it came."""
    child = os.fork()
    if child == 0:
        try:
            dist.is_initialized = lambda: joined  # type: ignore[assignment]  # in this process
            sys.stderr = io.StringIO()
            end_process(lambda: 1 // 0)
        except ZeroDivisionError:
            os._exit(7)
        except BaseException:  # noqa: BLE001  the test's own process must not go on twice
            os._exit(8)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, and WORLD_SIZE is 2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "b"}, "MASTER_PORT is 'b', not a number"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7000"}, "WORLD_SIZE is 2, but RANK is not set"),
    ],
)
def test_mistakes_of_the_environment_are_named(
    given: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        checked_rendezvous()
    assert said in caught.value.what and "oblr-megatron train" in caught.value.fix


def test_ranks_that_never_come_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the rendezvous leaves threads."""
    code = (
        "from oblr_megatron.config import ParallelConfig\n"
        "from oblr_megatron.errors import RunError\n"
        "from oblr_megatron.model.parallel import join\n"
        "try:\n"
        "    join(ParallelConfig(distributed_timeout_s=2))\n"
        "except RunError as error:\n"
        "    print(error)\n"
    )
    port = free_port()
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | given, capture_output=True, text=True, check=False
    )
    last = done.stdout.splitlines()[-1:]
    assert last and last[0].startswith(f"rank 0 did not find all of the 2 ranks at 127.0.0.1:{port}: "), done.stderr


def test_ranks_that_do_not_fit_are_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert rank_from_environment() == (1, 3)
    with pytest.raises(UserError, match=r"3 ranks .* 2 x pipeline_model_parallel_size 1 = 2"):
        initialize(ParallelConfig(tensor_model_parallel_size=2))
    assert not dist.is_initialized()
    assert not cpu.installed()


def fail_on_rank_one() -> int:
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.barrier()  # never comes back: the other rank is gone
    return 0


def test_the_launcher_reports_a_failing_rank_and_ends_the_others() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*the reason"):
        run_ranks(fail_on_rank_one, 2)


def sleep_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def give_up_on_rank_one() -> None:
    collectives = Collectives(dist.get_rank())
    if dist.get_rank() == 1:
        time.sleep(600)

    def main() -> int:
        with suppress(DeadlineError), ExitStack() as stack:
            stack.push(leave)
            collectives.gather(Outcome(), what="nothing", seconds=0.3)
        return 1

    end_process(main)


def test_a_rank_that_gave_up_on_another_ends_although_that_one_does_not() -> None:
    """The collective that it waited for is pending: gloo's teardown would wait for the other rank's connections."""
    with pytest.raises(RankError, match="rank 0 died without a word"):
        run_ranks(give_up_on_rank_one, 2, deadline_s=60)


def die() -> None:
    os._exit(3)


def test_the_launcher_names_who_is_late_and_who_died() -> None:
    with pytest.raises(RankError, match=r"ranks \[(0, )?1\] did not answer"):  # rank 0 too, on a slow machine
        run_ranks(sleep_on_rank_one, 2, deadline_s=8)
    with pytest.raises(RankError, match="died without a word"):
        run_ranks(die, 1)
