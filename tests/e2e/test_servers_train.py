"""Whole runs that sample from an API server.

On two tensor-parallel ranks the first step is the same as with the run's own engines. A server killed during a run
costs one restart and nothing else; one that does not come back ends the run, with a checkpoint. Not covered: several
servers (test_servers.py), CUDA.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oblr_megatron.checkpoint.store import checkpoints_of
from tests.e2e.api_server import KEY, ApiServer
from tests.e2e.conftest import LIMIT_S, ROOT, environment, records, torchrun, wait_for_lines
from tests.e2e.forked import forked

SAME_STEP = ("loss", "gradnorm/sq_mean", "grad_norm", "reward/mean", "entropy", "response_length/mean")


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[ApiServer]:
    with ApiServer(tiny / "model", tiny / "server.log", max_model_len=32) as one:
        yield one


@pytest.mark.nightly
def test_a_server_takes_the_place_of_the_runs_own_engines(
    server: ApiServer, tmp_path: Path, overrides: Callable[..., list[str]]
) -> None:
    layout = {"parallel__tensor_model_parallel_size": 2, "num_steps": 2}
    for name, servers in (("own", "[]"), ("server", f'["{server.url}"]')):
        result = forked(2, overrides(tmp_path / name, **layout, rollout__servers=servers), OBLR_API_KEY=KEY)
        assert result.returncode == 0, f"{name}: {result.stderr[-3000:]}"
    own, other = records(tmp_path / "own"), records(tmp_path / "server")
    assert [step["weights/version"] for step in other] == [1, 2]
    assert all(step["rollout/logprob_abs_diff"] <= 1e-3 for step in other)
    assert all(step["rollout/restarts"] == 0 for step in other)
    for key in SAME_STEP:
        assert other[0][key] == pytest.approx(own[0][key], rel=1e-5), key


@pytest.mark.nightly
def test_a_run_outlives_its_server(
    server: ApiServer, tmp_path: Path, overrides: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed at any moment (rollout, push, idle) after the first step, and started again."""
    monkeypatch.setenv("OBLR_API_KEY", KEY)
    keys = overrides(tmp_path / "run", num_steps=60, rollout__servers=f'["{server.url}"]')
    job = subprocess.Popen(
        torchrun(2, keys), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for_lines(3, tmp_path / "run" / "metrics.jsonl", job)
        server.end(signal.SIGKILL)
        server.start()
        _, stderr = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, stderr[-3000:]
    steps = records(tmp_path / "run")
    assert [step["weights/version"] for step in steps] == list(range(1, 61))
    assert sum(step["rollout/restarts"] for step in steps) == 1


def test_a_run_saves_its_state_when_its_server_does_not_come_back(
    tiny: Path, tmp_path: Path, overrides: Callable[..., list[str]]
) -> None:
    server = ApiServer(tiny / "model", tmp_path / "server.log", max_model_len=32)
    server.wait_ready()
    keys = overrides(
        tmp_path / "run",
        num_steps=100_000,
        rollout__servers=f'["{server.url}"]',
        rollout__start_timeout_s=5,
        checkpoint__every_steps=0,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(forked, 1, keys, OBLR_API_KEY=KEY)
        try:
            while not job.done() and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
                time.sleep(0.01)
        finally:
            server.end(signal.SIGKILL)
        result = job.result()
    assert result.returncode == 1, result.stderr[-3000:]
    (newest,) = checkpoints_of(tmp_path / "run")
    assert newest.name == f"step_{len(records(tmp_path / 'run')):08d}"
