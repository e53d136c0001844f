"""Whole runs on saved samples, ended in every way at random moments: nothing is lost and nothing is left behind.

A run's processes carry a mark in their environment, by which those left behind are found, whoever adopted them.
Not covered: many ends of one run (test_many_kills.py), runs with engines (test_kill_resume.py), a machine that loses
power.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from oblr_megatron.checkpoint.store import checkpoints_of
from oblr_megatron.observe.status import read_status
from oblr_megatron.runtime.processes import children_of
from tests.distributed.replayed import config_of, make_inputs
from tests.e2e.conftest import ROOT, environment, wait_for
from tests.slurm.rewards import HELD_AFTER, HOLD

STEPS = 40
MARK = "OBLR_TEST_MARK"
GONE_S = 60.0
CLI = [sys.executable, "-m", "oblr_megatron.cli", "train"]
TORCHRUN = [*[sys.executable, "-m", "torch.distributed.run", "--standalone"], *["--nproc-per-node", "2"]]
COMMANDS = {
    "one rank": (CLI, []),
    "launcher": (CLI, ["--nproc-per-node", "2"]),
    "torchrun": ([*TORCHRUN, "-m", "oblr_megatron.step_loop"], []),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, saved samples of 40 steps, and a TOML file."""
    directory = make_inputs(tmp_path_factory.mktemp("inputs"), steps=STEPS)
    (directory / "config.toml").write_text(
        f'num_steps = {STEPS}\nnum_prompts = 4\ngroup_size = 4\n[model]\npath = "{directory}/model"\n'
        "make_vocab_size_divisible_by = 8\n[data]\ntrain = 'none'\nmax_prompt_tokens = 16\n[rollout]\n"
        f'replay = "{directory}/rollouts"\nmax_response_tokens = 16\nimportance_sampling = "none"\n[reward]\n'
        'name = "exact_match"\nnum_workers = 1\n[gradnorm]\nmode = "bookkeep"\n[algo.snr]\nnum_folds = 2\n'
        "[optimizer]\nlr = 1e-2\n[checkpoint]\nevery_steps = 1\nexport_hf = true\n[log]\ntrackers = []\n"
    )
    assert config_of(directory, directory / "run", f"num_steps={STEPS}").num_steps == STEPS
    return directory


@dataclass
class Job:
    """A started run and the directory that is its TMPDIR."""

    process: subprocess.Popen[str]
    mark: str
    run_dir: Path
    tmp: Path

    def ranks(self) -> list[int]:
        return children_of(self.process.pid)

    def family(self) -> list[int]:
        """All processes with the mark."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has just ended
                continue
        return found

    def steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


def start(kind: str, inputs: Path, run_dir: Path, tmp: Path, *arguments: str) -> Job:
    tmp.mkdir(exist_ok=True)
    command, ranks = COMMANDS[kind]
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [*command, str(inputs / "config.toml"), f"run_dir={run_dir}", *arguments, *ranks],
        cwd=ROOT,
        env=environment() | {MARK: mark, "TMPDIR": str(tmp)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Job(process, mark, run_dir, tmp)


def assert_gone(job: Job) -> None:
    end = time.monotonic() + GONE_S
    while (left := job.family()) and time.monotonic() < end:
        time.sleep(0.1)
    try:
        assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def unbroken(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The same run without a kill, for each command."""
    done: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in done:
            directory = tmp_path_factory.mktemp("unbroken")
            job = start(kind, inputs, directory / "run", directory / "tmp")
            assert job.process.wait(300) == 0
            done[kind] = directory / "run"
        return done[kind]

    return make


def test_ctrl_c_saves_and_leaves_nothing_in_tmpdir(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    monkeypatch.setenv(HOLD, str(hold))
    options = ["checkpoint.every_steps=0", "reward.name=tests.slurm.rewards:held_match", "reward.timeout_s=120"]
    job = start("one rank", inputs, tmp_path / "run", tmp_path / "tmp", *options)
    wait_for(lambda: job.steps() >= HELD_AFTER, job.process)
    assert read_status(job.run_dir).state == "running"
    job.process.send_signal(signal.SIGINT)
    hold.unlink()  # only now can the run come to its end
    out, err = job.process.communicate(timeout=60)
    steps = job.steps()
    assert (
        job.process.returncode == 0 and f"stopped after step {steps} of {STEPS} (SIGINT)" in out and "--resume" in out
    )
    assert [line for line in err.splitlines() if "SIGINT" in line or "Traceback" in line] == err.splitlines(), err
    assert len(err.splitlines()) == 1
    status = read_status(job.run_dir)
    assert (status.state, status.step, status.reason) == ("stopped", steps, "SIGINT")
    assert [path.name for path in checkpoints_of(job.run_dir)] == [f"step_{steps:08}"]
    assert not list(job.tmp.iterdir()) and not (job.run_dir / "lock.json").exists()


@pytest.mark.nightly
def test_a_killed_rank_ends_the_job_with_one_line_of_ours(inputs: Path, tmp_path: Path) -> None:
    job = start("launcher", inputs, tmp_path / "run", tmp_path / "tmp")
    wait_for(lambda: job.steps() >= 1, job.process)
    killed = job.ranks()[1]
    os.kill(killed, signal.SIGKILL)
    _, err = job.process.communicate(timeout=60)
    assert job.process.returncode == 1
    assert "Traceback" not in err and "GLHF" not in err and "ChildFailedError" not in err
    assert f"rank 1 (process {killed}) was ended by SIGKILL; see {job.run_dir}/logs/launcher.log" in err
    assert "exitcode" in (job.run_dir / "logs" / "launcher.log").read_text()
    assert len(err.splitlines()) <= 2, err
    assert_gone(job)
    assert read_status(job.run_dir).state in ("failed", "lost") and not list(job.tmp.iterdir())


def test_a_launcher_killed_in_its_first_seconds_leaves_no_rank(inputs: Path, tmp_path: Path) -> None:
    """Ranks that import for seconds check their launcher first."""
    kill_launchers(2, inputs, tmp_path)


def kill_launchers(kills: int, inputs: Path, tmp_path: Path) -> None:
    """Every second kill comes within 4 s of the ranks' start, the others within 15 s of the launcher's."""
    draw = random.Random(4)
    delays = [draw.uniform(0, 15) for _ in range(kills)]

    def kill(number: int) -> Job:
        job = start("launcher", inputs, tmp_path / f"run{number}", tmp_path / "tmp")
        with job.process:
            deadline = time.monotonic() + GONE_S
            while number % 2 and not job.ranks():
                assert time.monotonic() < deadline and job.process.poll() is None, "no rank was started"
                time.sleep(0.02)
            time.sleep(delays[number] / 4 if number % 2 else delays[number])
            assert job.process.poll() is None or not number % 2, "it has ended by itself"
            job.process.kill()
        return job

    with ThreadPoolExecutor(2) as pool:
        for job in pool.map(kill, range(kills)):
            assert_gone(job)
