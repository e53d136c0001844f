"""Whatever a reward function starts ends with its call, its worker, and the run, however these end.

Not covered: processes of another user (sudo), and SIGKILL of supervisor and fork server at the same moment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from oblr_megatron.processes.pool import Pool
from oblr_megatron.runtime.processes import children_of
from tests.unit.processes.test_pool import ROOT, is_running, parent_of, wait_until_gone
from tests.unit.waiting import until

SCORERS = "tests.unit.processes.scorers_children"
WAYS = ("program", "fork", "double fork", "daemon", "family")


def make(name: str = "starts", **options: object) -> closing[Pool]:
    values: dict = {"num_workers": 1, "deadline_s": 30.0, **options}
    return closing(Pool(f"{SCORERS}:{name}", **values))


def told_in(path: Path) -> list[int]:
    """The process ids that a reward function wrote."""
    return [int(pid) for pid in path.read_text().split()]


@pytest.fixture(scope="module")
def pool():
    with make() as pool:
        yield pool


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("then", ["return", "raise", "die"])
def test_what_a_call_has_started_ends_with_its_answer(pool: Pool, tmp_path: Path, how: str, then: str) -> None:
    score = pool.ask(how, then, str(tmp_path / "told"))
    assert score.value == (1.0 if then == "return" else None) and not score.timed_out
    assert not any(map(is_running, told_in(tmp_path / "told")))


@pytest.mark.parametrize("name", ["starts", "starts_async"])
def test_what_a_call_has_started_ends_at_its_deadline(tmp_path: Path, name: str) -> None:
    with make(name, deadline_s=8.0, num_workers=len(WAYS)) as pool:  # a busy machine starts them in seconds
        rows = [(how, "hang", str(tmp_path / how)) for how in WAYS]
        scores = pool.map(rows)
        assert all(score.timed_out for score in scores)
        assert not any(is_running(pid) for how in WAYS for pid in told_in(tmp_path / how))


def test_a_forked_child_that_returns_gives_no_second_answer() -> None:
    with make("forks") as pool:
        assert [pool.ask(text, "", "").value for text in "123"] == [1, 2, 3]


def test_programs_used_as_they_should_be_work(tmp_path: Path) -> None:
    with make("echoes") as pool:
        assert [score.value for score in pool.map([("0.5", "", ""), ("2", "", "")])] == [0.5, 2.0]


def test_what_the_import_has_started_lives_as_long_as_the_pool(tmp_path: Path) -> None:
    with make("process_ids", num_workers=2, tasks_per_worker=1) as pool:
        helpers = {pool.ask("", "", str(tmp_path / "told")).value for _ in range(3)}
        (helper,) = (int(pid or 0) for pid in helpers)
        assert is_running(helper), "three workers have come and gone"
    assert not is_running(helper)


@pytest.mark.parametrize("victim", ["worker", "fork server", "supervisor", "trainer", "pool"])
def test_everything_ends_whoever_is_killed(tmp_path: Path, victim: str) -> None:
    """A call has started two daemons and hangs."""
    script = f"""
import sys, threading
from oblr_megatron.processes.pool import Pool
pool = Pool("{SCORERS}:starts", num_workers=1, deadline_s=600)
threading.Thread(target=pool.ask, args=("daemon", "hang", sys.argv[1]), daemon=True).start()
sys.stdin.read()
pool.close()
"""
    told = tmp_path / "told"
    trainer = subprocess.Popen([sys.executable, "-c", script, str(told)], cwd=ROOT, stdin=subprocess.PIPE)
    try:
        until(lambda: told.exists() and len(told_in(told)) == 2)
        (supervisor,) = children_of(trainer.pid)
        (server,) = children_of(supervisor)
        (worker,) = (pid for pid in children_of(server) if children_of(pid))
        levels = {"worker": worker, "fork server": server, "supervisor": supervisor, "trainer": trainer.pid}
        started = told_in(told)
        wait_for_parent(started[0], worker)
        assert all(map(is_running, started))
        if victim == "pool":
            trainer.communicate(b"")
        else:
            os.kill(levels[victim], signal.SIGKILL)
        for pid in started if victim == "worker" else (*started, worker, server, supervisor):
            wait_until_gone(pid)
    finally:
        trainer.kill()
        trainer.wait()


def wait_for_parent(pid: int, parent: int) -> None:
    """A daemon becomes its subreaper's child when the process that has forked it ends, a moment after it has told."""
    until(lambda: parent_of(pid) == parent)
