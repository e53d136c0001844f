"""Stopping before the end: signals are noted, never acted on in the handler; the clock counts from the right start.

Signals that go through the launcher are in tests/e2e/test_launch.py. Not covered: a SLURM that sends them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from oblr_megatron.config.checkpoint import CheckpointConfig
from oblr_megatron.errors import UserError
from oblr_megatron.runtime.stopping import REASONS, REPEAT_S, SLURM_END, StopRequest, end_of_job, started_at
from tests.distributed.launch import run_ranks


def options(**fields: float) -> CheckpointConfig:
    return CheckpointConfig(**fields)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_and_said_once(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    former = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
    with StopRequest(options(), {}) as stop:
        assert stop.due(1e9) is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # sent to the launcher, which forwards it, and to the rank
        assert stop.due(0.0) == number.name
        assert stop.agreed(0.0, None) == number.name
    assert capfd.readouterr().err == f"{number.name}: saving at the next step boundary\n"
    assert former == {each: signal.getsignal(each) for each in former}


def test_one_rank_of_a_node_speaks(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest(options(), {"LOCAL_RANK": "1"}) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.due(0.0) == "SIGUSR1"
    assert capfd.readouterr().err == ""


def test_the_end_after_the_warning_is_the_reason_given() -> None:
    """SLURM warns, and later ends: both are for the same stop."""
    with StopRequest(options(), {}) as stop:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert stop.due(0.0) == "SIGTERM"


def test_a_second_sigterm_ends_the_process_at_once() -> None:
    program = (
        "import time\nfrom oblr_megatron.config.checkpoint import CheckpointConfig\n"
        "from oblr_megatron.runtime.stopping import StopRequest\n"
        "with StopRequest(CheckpointConfig()):\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGTERM)
        time.sleep(REPEAT_S + 2)  # it counts from when it hears the first one
        assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == -signal.SIGTERM


def test_another_thread_may_enter_and_hears_no_signal() -> None:
    former = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def enter() -> None:
        with StopRequest(options(), {}) as stop:
            seen.extend([signal.getsignal(signal.SIGTERM), stop.due(0.0)])

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [former, None]


@pytest.mark.parametrize(
    ("longest", "margin", "left", "reason"),
    [
        (10, 60, 100, None),
        (10, 60, 60, "the time limit"),
        (50, 60, 100, "the time limit"),  # the next step might not fit
        (50, 0, 1, None),  # 0: never
    ],
)
def test_a_stop_is_due_when_another_step_might_not_fit(
    longest: float, margin: float, left: float, reason: str | None
) -> None:
    soon = str(int(time.time() + left))
    assert StopRequest(options(exit_before_timeout_s=margin), {SLURM_END: soon}).due(longest) == reason


def test_a_limit_of_the_config_counts_from_the_start_of_the_process() -> None:
    started = started_at(os.getpid())
    assert 0 < time.time() - started < 24 * 3600
    limited = options(time_limit_s=1000.0, exit_before_timeout_s=1.0)
    assert end_of_job(limited, {SLURM_END: "1"}) == pytest.approx(started + 1000, abs=0.1)
    assert end_of_job(limited, {"TORCHELASTIC_RUN_ID": "1"}) == pytest.approx(started_at(os.getppid()) + 1000, abs=0.1)


def test_the_start_of_a_process_is_when_it_started() -> None:
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert before - 0.05 <= started_at(child.pid) <= time.time() + 0.05
        child.communicate(b"\n")


def test_a_margin_without_a_limit_is_refused() -> None:
    with pytest.raises(UserError, match=r"exit_before_timeout_s is 60, but no time limit is known.*time_limit_s"):
        StopRequest(options(exit_before_timeout_s=60), {})
    assert end_of_job(options(), {}) is None


def agree(index: int | None) -> list[str | None]:
    """On a rank: what it would do, and what is agreed, before and after one rank got a signal."""
    rank = dist.get_rank()
    environment = {SLURM_END: str(int(time.time()) + 10), "LOCAL_RANK": "1"}
    found = []
    with StopRequest(options(exit_before_timeout_s=60 if rank == 0 else 0), environment) as stop:
        if rank == index:
            os.kill(os.getpid(), signal.SIGUSR1)
        found += [stop.due(0.0), stop.agreed(0.0, dist.group.WORLD)]
    return found


def test_all_ranks_stop_for_the_same_reason() -> None:
    """Rank 0 sees the time run out, rank 2 got a signal, rank 1 knows of neither."""
    assert run_ranks(agree, 3, None) == [["the time limit"] * 2, [None, "the time limit"], [None, "the time limit"]]
    assert run_ranks(agree, 3, 2) == [["the time limit", "SIGUSR1"], [None, "SIGUSR1"], ["SIGUSR1", "SIGUSR1"]]


def test_the_reasons_are_the_names_of_signals() -> None:
    assert REASONS[2:] == (signal.SIGUSR1.name, signal.SIGTERM.name)
