"""What a worker writes about its running job, as another process reads it at the same time."""

from __future__ import annotations

import asyncio
import os
import time
from itertools import pairwise

import pytest

from oblr_megatron.processes.watch import JOB, NOBODY, Watch, watch_tasks
from tests.unit.waiting import until

READS = 100_000


def test_the_seconds_of_others_never_fall() -> None:
    """A job's clock would jump ahead. The writer is another process, so that a read may meet half of a write.

    Half-written values differ by more than the machine's uptime; a writer that has to wait, by less than a second.
    """
    watch = Watch()
    writer = os.fork()
    if writer == 0:
        while True:
            for number in range(3):
                watch.set(number)
                watch.set(NOBODY)
    try:
        until(lambda: watch.seconds_of_others(1) > 0)
        found = [watch.seconds_of_others(1) for _ in range(READS)]
    finally:
        os.kill(writer, 9)
        os.waitpid(writer, 0)
    assert found[-1] > found[0] >= 0
    assert max(earlier - later for earlier, later in pairwise(found)) < 1.0
    watch.set(NOBODY)  # as after a kill in the middle of a write
    assert watch.get()[0] == NOBODY
    watch.close()


def test_a_job_is_charged_for_its_own_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 4.0, 9.0, 9.0, 11.0, 11.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    watch = Watch()  # at 0
    watch.set(7)  # from 1 to 4
    watch.set(8)  # from 4
    assert watch.seconds_of_others(7) == 0.0
    assert watch.seconds_of_others(7) == 5.0, "the step that runs now counts"
    assert watch.seconds_of_others(8) == 3.0
    watch.set(NOBODY)  # at 11
    assert watch.seconds_of_others(9) == 10.0
    watch.close()


def test_a_watched_task_is_cancelled_with_its_task_group() -> None:
    """As at the end of a session of an MCP client. anyio asks a task's coroutine whether it runs."""
    anyio = pytest.importorskip("anyio")
    watch = Watch()

    async def episode() -> str:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 60)
            await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        return "done"

    async def main() -> str:
        watch_tasks(asyncio.get_running_loop(), watch, {})
        JOB.set(7)
        return await asyncio.create_task(episode())

    assert asyncio.run(main()) == "done"
    watch.close()
