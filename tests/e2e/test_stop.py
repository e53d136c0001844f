"""A signal stops a real training run: it finishes and saves the current step and can be resumed.

Not covered: bit-equality after a resume (test_resume.py, test_kill_resume.py), signals from a real SLURM.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from oblr_megatron.checkpoint.store import check_contents, checkpoints_of, read_manifest
from tests.e2e.conftest import ROOT, environment, records, wait_for_lines
from tests.e2e.forked import forked

COMMAND = [sys.executable, "-m", "oblr_megatron.cli", "train", "examples/tiny_cpu/config.toml"]
LONG = 100_000  # steps


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_every_process_of_a_run_saves_it(
    tmp_path: Path, overrides: Callable[..., list[str]], number: signal.Signals
) -> None:
    """SLURM signals all of them: the launcher, the ranks, their engine and the reward workers."""
    directory = tmp_path / "run"
    ranks = ["--nproc-per-node", "2"] if number == signal.SIGTERM else []
    given = overrides(directory, num_steps=LONG, checkpoint__every_steps=0)
    job = subprocess.Popen(
        [*COMMAND, *given, *ranks],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_lines(2, directory / "metrics.jsonl", job)
        family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        for process in family:
            process.send_signal(number)
        stdout, stderr = job.communicate(timeout=120)
    finally:
        job.kill()
    steps = len(records(directory))
    assert job.returncode == 0, stderr[-3000:]
    assert f"stopped after step {steps} of {LONG} ({number.name}); continue with --resume" in stdout
    assert stderr.count(f"{number.name}: saving at the next step boundary") == 1
    assert not psutil.wait_procs(family, timeout=10)[1]
    (newest,) = checkpoints_of(directory)
    manifest = read_manifest(newest)
    check_contents(newest, manifest, manifest.files)
    assert manifest.step == steps
    assert not (directory / "hf").exists(), "it goes on"
    again = overrides(directory, num_steps=steps + 1, checkpoint__every_steps=0)
    result = forked(2 if ranks else 1, [*again, "--resume"])
    assert result.returncode == 0, result.stderr[-3000:]
    assert [record["step"] for record in records(directory)] == list(range(1, steps + 2))
