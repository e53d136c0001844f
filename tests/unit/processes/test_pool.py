"""The worker pool with functions that raise, exit, crash, hang, exhaust memory or print.

Not covered: operating systems other than Linux.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import psutil
import pytest

from oblr_megatron.errors import RunError
from oblr_megatron.processes.calls import score_of
from oblr_megatron.processes.pool import Pool
from oblr_megatron.runtime.stopping import SIGNALS
from tests.unit.processes.conftest import interrupted, unhurried
from tests.unit.waiting import until

SCORERS = "tests.unit.processes.scorers"
ROOT = Path(__file__).resolve().parents[3]


def make(name: str = "mixed", **options: object) -> closing[Pool]:
    values: dict = {"num_workers": 2, "deadline_s": 30.0, **options}
    return closing(Pool(f"{SCORERS}:{name}", **values))


@pytest.fixture(scope="module")
def pool():
    with make() as pool:
        yield pool


def is_fine(pool: Pool) -> bool:
    return pool.ask("fine", "", "").value == 1


def test_values_come_back_in_order() -> None:
    with make("length_share", num_workers=3) as pool:
        outcomes = pool.map([("x" * n, "gold", "prompt") for n in range(40)])
    assert [outcome.value for outcome in outcomes] == [n / 10 for n in range(40)]


def test_numpy_numbers_are_accepted() -> None:
    with make("as_numpy") as pool:
        assert pool.ask("", "", "").value == 0.5


def test_decimal_numbers_are_accepted() -> None:
    assert score_of(Decimal("0.5")).value == 0.5
    assert score_of(Decimal("NaN")).error == "the reward Decimal('NaN') is not a finite number"


@pytest.mark.parametrize(
    ("response", "named"),
    [
        ("raise", "ValueError: no such answer"),
        ("exit", "SystemExit"),
        ("die", "died"),
        ("crash", "died"),
        ("memory", "memory"),
        ("text", "'five' is not a finite number"),
        ("nan", "not a finite number"),
        ("infinite", "not a finite number"),
        ("huge", "is beyond 1e+09"),
        ("none", "None is not a finite number"),
    ],
)
def test_a_failure_is_reported_and_the_next_call_works(pool: Pool, response: str, named: str) -> None:
    outcome = pool.ask(response, "", "")
    assert outcome.value is None and not outcome.timed_out
    assert named in outcome.error
    assert is_fine(pool)


@pytest.mark.parametrize("response", ["sleep", "spin"])
def test_the_deadline_is_hard(response: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch, response)
    with make(deadline_s=0.5) as pool:
        assert is_fine(pool)  # the workers' imports are not part of the deadline
        outcome = pool.ask(response, "", "")
        assert outcome.timed_out and outcome.value is None and outcome.error == ""
        assert is_fine(pool)


def test_a_hanging_call_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch, "sleep")
    with make(num_workers=2, deadline_s=2.0) as pool:
        outcomes = pool.map([("sleep", "", "")] + [("fine", "", "")] * 50)
    assert outcomes[0].timed_out
    assert [outcome.value for outcome in outcomes[1:]] == [1.0] * 50


def test_a_single_call_does_not_wait_for_a_whole_batch() -> None:
    with make("wait", num_workers=1) as pool:
        pool.ask("0")
        answered = threading.Event()
        busy = threading.Thread(target=lambda: (pool.map([("0.05",)] * 100), answered.set()))
        busy.start()
        time.sleep(0.2)
        assert pool.ask("0").value == 0
        assert not answered.is_set(), "the batch takes 5 s"
        busy.join()


def test_workers_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with make() as pool:
        assert pool.ask("print", "", "").value == 1
    assert capfd.readouterr() == ("", "")


def test_workers_are_replaced_after_tasks_per_worker_calls() -> None:
    with make("process_id", num_workers=1, tasks_per_worker=3) as pool:
        ids = [pool.ask("", "", "").value for _ in range(9)]
    assert [ids.count(pid) for pid in dict.fromkeys(ids)] == [3, 3, 3]


def test_a_killed_worker_or_fork_server_is_replaced() -> None:
    with make("process_id", num_workers=1) as pool:
        first = pool.ask("", "", "").value
        assert first is not None
        os.kill(int(first), signal.SIGKILL)
        wait_until_gone(int(first))
        second = pool.ask("", "", "").value
        assert second is not None and second != first
        os.kill(parent_of(int(second)), signal.SIGKILL)
        wait_until_gone(int(second))  # a worker ends with its fork server
        third = pool.ask("", "", "").value
        assert third is not None and third not in (first, second)


def test_a_worker_that_does_not_read_is_replaced() -> None:
    """It may be held by a thread that an earlier call has left. The message is larger than a socket's buffer."""
    with make("process_id", num_workers=1, deadline_s=1.0) as pool:
        first = pool.ask("", "", "").value
        assert first is not None
        os.kill(int(first), signal.SIGSTOP)
        second = pool.ask("x" * 2**21, "", "").value
        assert second is not None and second != first and not is_running(int(first))


def test_a_reply_that_stops_in_its_middle_has_a_deadline() -> None:
    with make("half_reply", num_workers=1, deadline_s=8.0) as pool:
        outcome = pool.ask("", "", "")
    assert outcome.value is None and "died" in outcome.error


def test_after_an_interrupted_call_the_next_has_its_own_reply() -> None:
    """Ctrl-C in a notebook: the worker with the unread reply is ended."""
    with make("process_id", num_workers=1) as pool:
        first = pool.ask("", "", "").value
        assert first is not None
        os.kill(int(first), signal.SIGSTOP)
        with interrupted(), pytest.raises(KeyboardInterrupt):
            pool.ask("", "", "")
        second = pool.ask("", "", "").value
        assert second is not None and second != first and not is_running(int(first))


def test_workers_ignore_the_signals_that_stop_a_run() -> None:
    """SLURM sends the signal to every process of the job, but the current step must still be scored."""
    with make("process_id", num_workers=1) as pool:
        first = pool.ask("", "", "").value
        assert first is not None
        for number in SIGNALS:
            os.kill(int(first), number)
            os.kill(parent_of(int(first)), number)
        time.sleep(0.2)
        assert pool.ask("", "", "").value == first
    with make("ended_child", num_workers=1) as pool:
        assert pool.ask("", "", "").value == -signal.SIGTERM, "programs started by a reward function do not ignore it"


def test_close_ends_all_processes_and_later_calls_fail() -> None:
    pool = make("process_id").thing
    pid = pool.ask("", "", "").value
    assert pid is not None
    pool.close()
    pool.close()
    wait_until_gone(int(pid))
    with pytest.raises(RunError, match="closed"):
        pool.ask("", "", "")


def test_the_error_for_a_target_that_cannot_be_imported() -> None:
    with make("no_such_function") as pool, pytest.raises(RunError, match="no_such_function"):
        pool.ask("", "", "")


def test_workers_die_with_their_parent() -> None:
    """An idle one, and one in a call that holds the interpreter lock."""
    script = f"""
import threading, time
from oblr_megatron.processes.pool import Pool
ids = Pool("{SCORERS}:process_id", num_workers=1, deadline_s=60)
pool = Pool("{SCORERS}:mixed", num_workers=1, deadline_s=60)
worker = int(ids.ask("", "", "").value)
threading.Thread(target=pool.ask, args=("spin", "", ""), daemon=True).start()
print(worker, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    started = psutil.Process(parent.pid)
    until(lambda: len(started.children(recursive=True)) >= 6)  # supervisor, fork server and worker of each pool
    family = [child.pid for child in started.children(recursive=True)]
    assert worker in family
    parent.kill()
    parent.wait()
    for pid in family:
        wait_until_gone(pid)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int) -> None:
    """Wait until a process has no entry in /proc or is a zombie."""
    until(lambda: not is_running(pid))
