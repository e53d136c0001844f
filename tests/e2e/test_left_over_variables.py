"""Variables of a launcher that are still in the environment: one rank waits for nobody, several say for whom."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.e2e.conftest import LIMIT_S, ROOT, environment, records
from tests.e2e.forked_processes import popen
from tests.ports import free_port

COMMAND = [sys.executable, "-m", "oblr_megatron.cli", "train", "examples/tiny_cpu/config.toml"]


def start(keys: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return popen([*COMMAND, *keys], cwd=ROOT, env=environment() | variables, stdout=pipe, stderr=pipe, text=True)


def test_one_rank_needs_no_rendezvous(tmp_path: Path, overrides: Callable[..., list[str]]) -> None:
    """Every pod of a PyTorchJob has such variables; nobody answers at this address."""
    given = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "worker-0.svc.invalid", "MASTER_PORT": "29511"}
    with start(overrides(tmp_path / "run"), given) as job:
        _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0 and "socket" not in errors, errors[-3000:]
    assert [record["step"] for record in records(tmp_path / "run")] == [1]


def test_a_wait_for_other_ranks_has_a_line_and_ends_with_a_signal(
    tmp_path: Path, overrides: Callable[..., list[str]]
) -> None:
    port = free_port()
    given = {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    with start(overrides(tmp_path / "run"), given) as job:
        try:
            assert job.stdout is not None
            lines = iter(job.stdout.readline, "")
            assert f"rank 0 waits for ranks 1 to 3 at 127.0.0.1:{port}" in next(
                line for line in lines if "waits" in line
            )
            job.send_signal(signal.SIGTERM)
            job.wait(60)
        finally:
            job.kill()
        assert job.stderr is not None and "error: ended by SIGTERM" in job.stderr.read()
    assert job.returncode == 128 + signal.SIGTERM
