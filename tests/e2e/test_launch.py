"""The launcher with real torchrun ranks that run a small script: signals reach them, and they end by themselves.

The script replaces a run: it takes steps until the ranks agree to stop, and then "saves". Not covered: several nodes.
"""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from oblr_megatron.runtime.launch import LATER_S
from tests.e2e.conftest import ROOT, environment, wait_for
from tests.ports import free_port

RUN = """
import os, sys, time
import torch.distributed as dist
from oblr_megatron.config.checkpoint import CheckpointConfig
from oblr_megatron.runtime.stopping import StopRequest

directory, fate = sys.argv[1:]
rank = os.environ["RANK"]
with StopRequest(CheckpointConfig()) as stop:
    dist.init_process_group("gloo")
    open(f"{directory}/ready_{rank}", "w").write(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
    reason, stop.stepping = None, True
    while reason is None:
        time.sleep(0.05)
        reason = stop.shared_reason(0.0, dist.group.WORLD)
    if fate == "slow":
        while stop._ending_at is None:
            time.sleep(0.05)  # until the signal has reached this rank as well
        open(f"{directory}/told_{rank}", "w").close()
    time.sleep(60 if fate == "slow" else 1.5)
    open(f"{directory}/saved_{rank}", "w").write(reason)
    dist.destroy_process_group()
    sys.exit(2 if fate == "refuses" else 3 if fate == "fails" and rank == "1" else 0)
"""


SIGNALS_ONCE = (
    signal.SIGUSR1,
    *(pytest.param(one, marks=pytest.mark.nightly) for one in (signal.SIGINT, signal.SIGHUP)),
)


def popen_forked(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """The import takes seconds, and the tests that run alone do without."""
    from tests.e2e.forked_processes import popen

    return popen(command, **options)


@contextmanager
def launched(directory: Path, fate: str = "saves", *, forked: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Two running ranks of the script; processes left at the end of the block are killed.

    Launcher and ranks are forked (forked_processes.py), or started as a user starts them.
    """
    (directory / "script.py").write_text(RUN)
    command = [sys.executable, "-m", "oblr_megatron.runtime.launch", "--standalone", "--nproc-per-node", "2"]
    start: Callable[..., subprocess.Popen[str]] = popen_forked if forked else subprocess.Popen
    job = start(
        [*command, str(directory / "script.py"), str(directory), fate],
        cwd=ROOT,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    family: list[psutil.Process] = []
    try:
        wait_for(lambda: len(list(directory.glob("ready_*"))) == 2, job)
        family = psutil.Process(job.pid).children(recursive=True)
        yield job
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, [process.cmdline() for process in alive]
    finally:
        for process in [*family, psutil.Process(job.pid)] if job.poll() is None else family:
            if process.is_running():
                process.kill()
        job.communicate(timeout=10)


def ranks_of(job: subprocess.Popen[str]) -> list[psutil.Process]:
    """In the order of ranks; a forked launcher has another child."""
    children = psutil.Process(job.pid).children()
    return [child for child in children if "oblr_megatron.runtime.rank" in str(child.cmdline())]


def saved(directory: Path) -> list[str]:
    """The ranks' files, in the order of ranks."""
    return [path.read_text() for path in sorted(directory.glob("saved_*"))]


@pytest.mark.parametrize("number", SIGNALS_ONCE)
def test_a_signal_lets_the_ranks_save_and_end_with_0(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path, forked=False) as job:
        job.send_signal(number)
        _, stderr = job.communicate(timeout=60)
        assert job.returncode == 0, stderr
        assert saved(tmp_path) == [number.name] * 2
        assert (tmp_path / "ready_0").read_text() == "1", "megatron-core's overlap needs it"
        assert stderr.count(f"{number.name}: saving at the next step boundary") == 1


@pytest.mark.alone  # the ranks count two signals as one if they come within a second
def test_a_signal_to_every_process_at_once_is_one_signal(tmp_path: Path) -> None:
    """SLURM signals all processes of a step, so each rank gets the signal twice."""
    with launched(tmp_path) as job:
        for process in [*ranks_of(job), job]:
            process.send_signal(signal.SIGTERM)
        _, stderr = job.communicate(timeout=60)
        assert job.returncode == 0, stderr
        assert saved(tmp_path) == ["SIGTERM"] * 2


def test_a_signal_to_one_rank_stops_all(tmp_path: Path) -> None:
    with launched(tmp_path) as job:
        ranks_of(job)[1].send_signal(signal.SIGUSR1)
        job.communicate(timeout=60)
        assert job.returncode == 0
        assert saved(tmp_path) == ["SIGUSR1"] * 2


@pytest.mark.alone
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGINT])
def test_a_second_signal_ends_the_ranks_without_waiting(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path, "slow", forked=False) as job:
        job.send_signal(number)
        wait_for(lambda: len(list(tmp_path.glob("told_*"))) == 2, job)
        time.sleep(LATER_S + 0.5)
        assert job.poll() is None
        job.send_signal(number)
        _, stderr = job.communicate(timeout=25)  # torchrun waits 30 s for ranks that ignore it
        assert job.returncode == 128 + number
        assert [line for line in stderr.splitlines() if "saving at" not in line] == [f"error: ended by {number.name}"]
        assert saved(tmp_path) == []


def test_a_rank_that_fails_while_it_ends_is_a_failure(tmp_path: Path) -> None:
    with launched(tmp_path, "fails") as job:
        job.send_signal(signal.SIGUSR1)
        _, stderr = job.communicate(timeout=60)
        assert job.returncode == 1
        assert "rank      : 1" in stderr and "exitcode  : 3" in stderr


def test_ranks_that_refuse_their_input_give_the_launcher_their_status(tmp_path: Path) -> None:
    with launched(tmp_path, "refuses") as job:
        job.send_signal(signal.SIGUSR1)
        _, stderr = job.communicate(timeout=60)
        assert job.returncode == 2
        assert "Traceback" not in stderr


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    """SIGKILL of the launcher sends them no signal; `launched` checks that none is left."""
    with launched(tmp_path) as job:
        job.kill()


def test_a_signal_before_there_are_ranks_ends_the_launcher(tmp_path: Path) -> None:
    """The launcher waits for a second node that never comes."""
    command = [sys.executable, "-m", "oblr_megatron.runtime.launch", "--nnodes", "2", "--rdzv-backend", "c10d"]
    rendezvous = ["--rdzv-endpoint", "localhost:0", "--rdzv-id", "alone", "--nproc-per-node", "1"]
    with subprocess.Popen(
        [*command, *rendezvous, str(tmp_path / "none.py")],
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        handles = 1 << signal.SIGTERM - 1
        status = Path(f"/proc/{job.pid}/status")
        caught = lambda: int(status.read_text().partition("SigCgt:")[2].split()[0], 16)  # noqa: E731
        wait_for(lambda: bool(caught() & handles), job)
        time.sleep(2)  # it listens by then
        job.send_signal(signal.SIGTERM)
        _, stderr = job.communicate(timeout=60)
        assert job.returncode == 128 + signal.SIGTERM, (job.returncode, stderr)
        assert "error: ended by SIGTERM" in stderr


def test_ranks_get_all_files_and_meet_at_the_nodes_name_in_slurm(tmp_path: Path) -> None:
    """Two nodes. Under SLURM the soft limit of open files is that of the shell that submitted the job."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    (tmp_path / "script.py").write_text(
        "import os, resource\n"
        f'with open(f"{tmp_path}/{{os.environ["RANK"]}}", "w") as file:\n'
        '    print(*resource.getrlimit(resource.RLIMIT_NOFILE), os.environ["MASTER_ADDR"], file=file)\n'
    )
    options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "oblr_megatron.runtime.launch", *options, "--nproc-per-node", "1"]
    nodes = [
        subprocess.Popen(
            ["bash", "-c", 'ulimit -Sn 256 && exec "$@"', "node", *command, str(tmp_path / "script.py")],
            cwd=ROOT,
            env=environment() | {"SLURMD_NODENAME": "127.0.0.5"},
        )
        for _ in range(2)
    ]
    assert [node.wait(timeout=120) for node in nodes] == [0, 0]
    assert [(tmp_path / rank).read_text().split() for rank in "01"] == [[str(most), str(most), "127.0.0.5"]] * 2


def test_a_master_port_in_use_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    with socket.create_server(("", 0)) as taken:
        port = ["--master-port", str(taken.getsockname()[1])]
        command = [sys.executable, "-m", "oblr_megatron.runtime.launch", *port, str(tmp_path / "script.py")]
        with popen_forked(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True) as done:
            _, errors = done.communicate(timeout=60)
    assert done.returncode == 1 and errors.count("\n") == 1, errors
    assert errors.startswith("error: the launchers cannot meet: ") and "--master-port" in errors
