"""Runs on saved samples that are ended many times: the unbroken run, to the bit, and nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from oblr_megatron.checkpoint.store import checkpoints_of
from oblr_megatron.observe.status import read_status
from tests.distributed.replayed import certain, exported
from tests.e2e.test_kills import COMMANDS, STEPS, assert_gone, inputs, kill_launchers, start, unbroken

__all__ = ["inputs", "unbroken"]
pytestmark = [pytest.mark.nightly, pytest.mark.alone]


def test_fifty_launchers_killed_in_their_first_seconds_leave_no_rank(inputs: Path, tmp_path: Path) -> None:
    kill_launchers(50, inputs, tmp_path)


def moments(draw: random.Random) -> Iterator[tuple[signal.Signals, bool]]:
    """Signals, and whether a single rank gets it instead of the process that was started."""
    while True:
        yield from draw.sample(
            [
                (signal.SIGKILL, False),
                (signal.SIGKILL, True),
                (signal.SIGINT, False),
                (signal.SIGHUP, False),
                (signal.SIGTERM, True),
            ],
            5,
        )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_run_ended_many_times_is_the_unbroken_run(
    kind: str, inputs: Path, tmp_path: Path, unbroken: Callable[[str], Path]
) -> None:
    """Metrics and weights are equal to the bit, and status.json is true after every end."""
    draw, run_dir, ends = random.Random(kind), tmp_path / "run", 0
    for number, at_rank in moments(draw):
        if not checkpoints_of(run_dir):
            (run_dir / "metrics.jsonl").unlink(missing_ok=True)  # the way out that the refusal names
        job = start(kind, inputs, run_dir, tmp_path / "tmp", "--resume")
        goal = job.steps() + draw.randrange(0, 8)
        wait_s = draw.uniform(0, 12) if goal == job.steps() else 120
        end = time.monotonic() + wait_s
        while job.steps() < goal + (goal == 0) * STEPS and job.process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        victims = [*job.ranks()[:2]] if at_rank and kind != "one rank" else []
        victim = draw.choice(victims) if victims else job.process.pid
        if job.process.poll() is None and ends < 8:
            with suppress(ProcessLookupError):  # the rank has just ended
                os.kill(victim, number)
            ends += 1
        job.process.communicate(timeout=120)
        assert_gone(job)
        if run_dir.exists() and (run_dir / "status.json").exists():
            assert read_status(run_dir).state != "running", (number, at_rank)
        if job.process.returncode == 0 and read_status(run_dir).state == "finished":
            break
    assert ends >= 6
    other = unbroken(kind)
    assert certain(run_dir) == certain(other)
    mine, theirs = exported(run_dir), exported(other)
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)
