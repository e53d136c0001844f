"""Early stops: the handler only notes signals, and the time limit counts from the right start.

tests/e2e/test_launch.py covers signals through the launcher. tests/e2e/test_slurm.py covers signals sent by SLURM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress

import pytest
import torch.distributed as dist

from oblr_megatron.config.checkpoint import CheckpointConfig
from oblr_megatron.errors import EXIT_SIGNAL, UserError
from oblr_megatron.runtime.processes import started_at
from oblr_megatron.runtime.stopping import (
    ENDING,
    KEY_REPEAT_S,
    REPEAT_S,
    SIGNALS,
    SLURM_END,
    StopRequest,
    check_time_left,
    end_of_job,
)
from tests.distributed.launch import run_ranks


def options(**fields: float) -> CheckpointConfig:
    return CheckpointConfig(**fields)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_printed_once(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    former = {each: signal.getsignal(each) for each in SIGNALS}
    with StopRequest(options(), {}) as stop:
        stop.stepping = True
        assert stop.due(1e9) is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # once from SLURM, once from the launcher
        assert stop.due(0.0) == number.name
        assert stop.shared_reason(0.0, None) == number.name
    assert capfd.readouterr().err.startswith(f"{number.name}: saving at the next step boundary")
    assert former == {each: signal.getsignal(each) for each in former}


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest(options(), {}) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.due(0.0) is None
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


@pytest.mark.parametrize("number", ENDING)
def test_before_the_first_step_a_signal_ends_the_run(number: signal.Signals) -> None:
    """Once: SLURM and the launcher may send the same one."""
    with pytest.raises(KeyboardInterrupt, match=number.name), StopRequest(options(), {}):
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)


WAITING = """
import sys, time
from oblr_megatron.config.checkpoint import CheckpointConfig
from oblr_megatron.runtime.command_line import guarded
from oblr_megatron.runtime.stopping import StopRequest

def command():
    with StopRequest(CheckpointConfig()):
        print("ready", flush=True)
        {wait}
    return 0

sys.exit(guarded(command))
"""


@pytest.mark.parametrize(
    ("wait", "number"),
    zip(["time.sleep(600)", "import threading; threading.Event().wait()", "input()"], ENDING, strict=True),
)
def test_a_command_that_waits_ends_with_one_line(wait: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", WAITING.format(wait=wait)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        job.send_signal(number)
        job.wait(60)
        assert job.stderr is not None and job.stderr.read() == f"error: ended by {number.name}\n"
    assert job.returncode == 128 + number


def test_one_rank_of_a_node_prints(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest(options(), {"LOCAL_RANK": "1"}) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.due(0.0) == "SIGUSR1"
    assert capfd.readouterr().err == ""


def test_sigterm_after_sigusr1_is_the_reason() -> None:
    """SLURM warns with SIGUSR1 and later sends SIGTERM for the same stop."""
    with StopRequest(options(), {}) as stop:
        stop.stepping = True
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert stop.due(0.0) == "SIGTERM"


@pytest.mark.parametrize("number", ENDING)
def test_a_second_signal_ends_a_process_that_is_busy_in_c(number: signal.Signals) -> None:
    program = (
        "import ctypes\nfrom oblr_megatron.config.checkpoint import CheckpointConfig\n"
        "from oblr_megatron.runtime.stopping import StopRequest\n"
        "with StopRequest(CheckpointConfig()) as stop:\n    stop.stepping = True\n"
        "    stop.at_once = lambda reason: print(reason, flush=True)\n    print('ready', flush=True)\n"
        "    while True:\n        ctypes.CDLL(None).usleep(60_000_000)\n"
    )
    between = KEY_REPEAT_S if number == signal.SIGINT else REPEAT_S
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(number)
        assert child.stderr is not None and "saving at the next step boundary" in child.stderr.readline()
        time.sleep(between + 1)  # counted from the arrival of the first signal
        assert child.poll() is None
        out, err = signalled_to_the_end(child, number)
        assert child.returncode == EXIT_SIGNAL + number
        assert out == f"{number.name}, twice\n" and err.splitlines()[-1] == f"error: ended by {number.name}"


@pytest.mark.parametrize("number", ENDING)
def test_before_the_first_step_one_signal_ends_a_wait_in_c(number: signal.Signals) -> None:
    program = (
        "import ctypes, threading\nfrom oblr_megatron.config.checkpoint import CheckpointConfig\n"
        "from oblr_megatron.runtime.stopping import StopRequest\n"
        "with StopRequest(CheckpointConfig()):\n    libc = ctypes.CDLL(None)\n"
        "    threading.Timer(1, print, ['ready'], {'flush': True}).start()\n"
        "    lock = (ctypes.c_char * 64)()\n    libc.pthread_mutex_lock(lock), libc.pthread_mutex_lock(lock)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        child.send_signal(number)
        child.wait(60)
        assert child.returncode == EXIT_SIGNAL + number
        assert child.stderr is not None and child.stderr.read().decode() == f"error: ended by {number.name}\n"


def signalled_to_the_end(child: subprocess.Popen[str], number: signal.Signals) -> tuple[str, str]:
    """What a process prints that gets a signal every second: one that stalls may take two for one."""
    for _ in range(60):
        child.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            return child.communicate(timeout=1)
    raise AssertionError("the process goes on")


def test_another_thread_may_enter_but_gets_no_signals() -> None:
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
def test_a_stop_is_due_if_the_next_step_may_not_fit(
    longest: float, margin: float, left: float, reason: str | None
) -> None:
    soon = str(int(time.time() + left))
    assert StopRequest(options(exit_before_timeout_s=margin), {SLURM_END: soon}).due(longest) == reason


@pytest.mark.parametrize(
    ("margin", "limit", "left", "refused"),
    [
        (900, None, 300, True),
        (900, None, 3600, False),
        (900, 900, 10, True),
        (900, 1000, 10, False),
        (0, None, 1, False),
    ],
)
def test_a_job_without_time_for_a_second_step_is_refused(
    margin: float, limit: float | None, left: float, refused: bool
) -> None:
    given = (
        options(exit_before_timeout_s=margin)
        if limit is None
        else options(exit_before_timeout_s=margin, time_limit_s=limit)
    )
    environment = {SLURM_END: str(int(time.time() + left))}
    with pytest.raises(UserError) if refused else nullcontext() as caught:
        check_time_left(given, environment)
    assert caught is None or str(margin) in caught.value.where


def test_a_configured_limit_counts_from_the_start_of_the_process() -> None:
    started = started_at(os.getpid())
    assert 0 < time.time() - started < 24 * 3600
    limited = options(time_limit_s=1000.0, exit_before_timeout_s=1.0)
    assert end_of_job(limited, {SLURM_END: "1"}) == pytest.approx(started + 1000, abs=0.1)
    assert end_of_job(limited, {"TORCHELASTIC_RUN_ID": "1"}) == pytest.approx(started_at(os.getppid()) + 1000, abs=0.1)


def test_a_margin_without_a_limit_is_refused() -> None:
    with pytest.raises(UserError, match="exit_before_timeout_s is 60") as caught:
        StopRequest(options(exit_before_timeout_s=60), {})
    assert "checkpoint.time_limit_s" in caught.value.where
    assert end_of_job(options(), {}) is None


def agree(index: int | None) -> list[str | None]:
    """On a rank: its own reason and the agreed one; rank `index` gets a signal."""
    rank = dist.get_rank()
    environment = {SLURM_END: str(int(time.time()) + 10), "LOCAL_RANK": "1"}
    found = []
    with StopRequest(options(exit_before_timeout_s=60 if rank == 0 else 0), environment) as stop:
        if rank == index:
            os.kill(os.getpid(), signal.SIGUSR1)
        found += [stop.due(0.0), stop.shared_reason(0.0, dist.group.WORLD)]
    return found


@pytest.mark.slow
def test_all_ranks_stop_for_the_same_reason() -> None:
    """Rank 0 is near the time limit, rank 2 got a signal, rank 1 has no reason."""
    assert run_ranks(agree, 3, None) == [["the time limit"] * 2, [None, "the time limit"], [None, "the time limit"]]
    assert run_ranks(agree, 3, 2) == [["the time limit", "SIGUSR1"], [None, "SIGUSR1"], ["SIGUSR1", "SIGUSR1"]]
