"""Variables of a launcher that are still in the environment: one rank waits for nobody, several say for whom."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.e2e.conftest import ROOT, environment, records, run

COMMAND = [sys.executable, "-m", "oblr_megatron.cli", "train", "examples/tiny_cpu/config.toml"]


def test_one_rank_needs_no_rendezvous(tmp_path: Path, overrides: Callable[..., list[str]]) -> None:
    """Every pod of a PyTorchJob has such variables; nobody answers at this address."""
    words = ["env", "WORLD_SIZE=1", "RANK=0", "MASTER_ADDR=worker-0.svc.invalid", "MASTER_PORT=29511"]
    result = run([*words, *COMMAND, *overrides(tmp_path / "run")])
    assert result.returncode == 0 and "socket" not in result.stderr, result.stderr[-3000:]
    assert [record["step"] for record in records(tmp_path / "run")] == [1]


def test_a_wait_for_other_ranks_has_a_line_and_ends_with_a_signal(
    tmp_path: Path, overrides: Callable[..., list[str]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with subprocess.Popen(
        [*COMMAND, *overrides(tmp_path / "run")],
        cwd=ROOT,
        env=environment() | given | {"LOCAL_RANK": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
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
