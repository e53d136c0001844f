"""Shared by the whole-run tests: the demo's task and model at a fraction of its training, and ways to start runs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400  # hard deadline of one run


def environment() -> dict[str, str]:
    """One thread a rank, without the variables that a surrounding torchrun may have set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "MASTER_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        kept.pop(name, None)
    return kept | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True, scope="session")
def forks_engines(request: pytest.FixtureRequest) -> None:
    """The engines and commands that tests start in this process, unless it runs a few tests only (`alone`)."""
    if not all(item.get_closest_marker("alone") for item in request.session.items):
        from tests.e2e.forked_processes import make_keeper

        make_keeper()


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A directory that `make` fills in the first of pytest's workers that asks for it; the others wait."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file
        if not out.with_suffix(".done").exists():
            shutil.rmtree(out, ignore_errors=True)  # of a worker that failed
            make(out)
            out.with_suffix(".done").touch()
    return out


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with train.jsonl, heldout.jsonl and a briefly warm-started Qwen3 (model/)."""

    def make(out: Path) -> None:
        from tests.e2e.forked import call_forked, run_script

        arguments = ["examples/tiny_cpu/prepare.py", "--out", str(out), "--steps", "60", "--threads", "1"]
        assert call_forked(run_script, 1, arguments, {}).returncode == 0

    return made_once(tmp_path_factory, "tiny_cpu", make)


@pytest.fixture(scope="session")
def overrides(tiny: Path) -> Callable[..., list[str]]:
    """Overrides that turn the demo's config into a short run on the small data."""

    def make(run_dir: Path, **keys: object) -> list[str]:
        values: dict[str, object] = {
            "run_dir": run_dir,
            "model.path": tiny / "model",
            "data.train": tiny / "train.jsonl",
            "num_prompts": 8,
            "group_size": 4,
            "reward.name": "tests.e2e.rewards:matching_characters",
            "num_steps": 1,
            "rollout.num_threads": 1,
            "evaluate.data.heldout": tiny / "heldout.jsonl",
            "evaluate.every_steps": 0,
            "log.trackers": "[]",
        }
        values |= {key.replace("__", "."): value for key, value in keys.items()}
        return [f"{key}={value}" for key, value in values.items()]

    return make


@pytest.fixture(scope="session")
def saved(overrides: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps on one rank, with its samples and their rows in rollouts/. Tests only read it."""

    def make(run_dir: Path) -> None:
        from tests.e2e.forked import forked

        result = forked(1, [*overrides(run_dir, num_steps=3, data__keep_columns="true"), "--save-rollouts"])
        assert result.returncode == 0, result.stderr[-3000:]

    return made_once(tmp_path_factory, "saved", make)


def torchrun(ranks: int, arguments: list[str]) -> list[str]:
    """The command line of a run on several ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", "oblr_megatron.step_loop", "examples/tiny_cpu/config.toml", *arguments]


def run(command: list[str], limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run to the end from the repository's root; output captured as text."""
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=limit_s, check=False
    )


def records(run_dir: Path) -> list[dict[str, float]]:
    """The steps of a finished run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def wait_for(condition: Callable[[], bool], job: subprocess.Popen[str], deadline_s: float = LIMIT_S) -> None:
    """Poll until the condition holds; the job must be alive until then."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert job.poll() is None, f"the job ended with {job.returncode}"
        assert time.monotonic() < end, "the job did not get there in time"
        time.sleep(0.01)


def wait_for_lines(count: int, path: Path, job: subprocess.Popen[str]) -> None:
    """Wait until the file (metrics.jsonl of a run, for example) has `count` lines."""
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= count, job)
