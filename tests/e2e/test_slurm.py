"""The job scripts of slurm/, unchanged, under a real SLURM: two hosts with one CPU rank each, the demo's model, vLLM.

`make test-slurm` starts the SLURM on hosts of its own (tests/slurm/cluster.sh) and runs this file.
tests/unit/extras/cluster/test_requeue.py covers all ways in which an attempt may end. Not covered: containers, GPUs,
NCCL, several machines' clocks and disks, other versions of SLURM.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from tests.distributed.replayed import certain, exported
from tests.e2e.conftest import ROOT
from tests.net.hosts import Host
from tests.slurm.job import ENDED, NODES, Job, slurm
from tests.slurm.rewards import HELD_AFTER

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3600),
    pytest.mark.skipif("OBLR_TEST_SLURM" not in os.environ, reason="needs a SLURM: make test-slurm"),
]
STEPS = 4
AWAY_S = 20  # longer than a few tries
RANK, LAUNCHER = "oblr_megatron.runtime.rank", "oblr_megatron.runtime.launch"
Arguments = Callable[..., list[str]]


@pytest.fixture(scope="module")
def arguments(overrides: Arguments) -> Arguments:
    """Overrides of the demo's config for a run of STEPS steps."""

    def make(**keys: object) -> list[str]:
        values = {"num_steps": STEPS, "reward__name": "tests.slurm.rewards:held", "reward__timeout_s": 3600} | keys
        return overrides(Path("unused"), **values)[1:]

    return make


@pytest.fixture(scope="module")
def unbroken(arguments: Arguments, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(tmp_path_factory.mktemp("slurm") / "job", arguments())
    assert job.run() == 0, job.output()
    return job


def assert_equal(job: Job, other: Job) -> None:
    """The same metrics and weights, bit for bit."""
    assert certain(job.run_dir) == certain(other.run_dir)
    first, second = exported(job.run_dir), exported(other.run_dir)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in second)


def test_a_job_from_the_dry_run_to_the_last_step(unbroken: Job) -> None:
    said = unbroken.output()
    assert f"job {unbroken.id}, attempt 0, 2 nodes x 1 ranks: {' '.join(NODES)}" in said
    assert json.loads(unbroken.log("dry_run.log").splitlines()[-1])["world_size"] == 2
    table = unbroken.log("preflight.log")
    assert "preflight: 2 nodes ready" in table and table.count(" ok") == 2
    assert f"finished after step {STEPS}: {unbroken.run_dir}" in said
    assert (unbroken.status().state, unbroken.status().step) == ("finished", STEPS)
    assert "cpu binding" not in said and "warning" not in said


def test_a_job_near_its_time_limit_is_requeued_and_ends_as_the_unbroken_one(
    unbroken: Job, arguments: Arguments, tmp_path: Path
) -> None:
    """SLURM sends the signal, because the job's time limit becomes shorter than the margin and the time it ran."""
    job = Job(tmp_path / "job", arguments(checkpoint__every_steps=0), holds=True, variables={"OBLR_DRY_RUN": "0"})
    job.options = ["--time=10:00:00", "--signal=B:USR1@18000"]
    with job.submitted():
        job.wait_held()
        job.update(TimeLimit="05:00:00")
        job.wait_for(lambda: "SIGUSR1: asking the run" in job.output(), alive=True)
        job.hold.unlink()
        job.wait_for(lambda: job.shown("Restarts") == "1")
        job.update(TimeLimit="10:00:00")
        assert job.wait_end() == 0, job.output()
    saved = HELD_AFTER + 1
    assert f"stopped (SIGUSR1), step {saved} is saved" in job.output()
    assert f"job {job.id}, attempt 1," in job.output()
    assert f"continues after step {saved}" in "".join(job.log(f"node_{node}.log", attempt=1) for node in (0, 1))
    assert job.status().state == "finished"
    assert_equal(job, unbroken)


@pytest.mark.parametrize("first", [True, False])
def test_a_killed_rank_ends_the_job(arguments: Arguments, tmp_path: Path, first: bool) -> None:
    """Rank 0 or the other one. Rank 0 writes status.json, so without it the run is lost."""
    job = Job(tmp_path / "job", arguments(), holds=True, variables={"OBLR_DRY_RUN": "0", "OBLR_PREFLIGHT": "0"})
    with job.submitted():
        job.wait_held()
        (rank,) = [rank for rank in ranks(job) if (rank.pid == job.status().pid) == first]
        rank.kill()
        job.hold.unlink()
        assert job.wait_end() == 1, job.output()
    assert job.state() == "FAILED" and job.shown("Restarts") == "0"
    assert "error: the run failed (status " in job.output()
    assert "was ended by SIGKILL" in job.output()
    found = job.status()
    assert (found.state, found.step) == ("lost" if first else "failed", HELD_AFTER), found


def ranks(job: Job) -> list[psutil.Process]:
    """The ranks of both nodes: children of the launchers."""
    launchers = [process.pid for process in job.processes(LAUNCHER)]
    return [process for process in job.processes(RANK) if process.ppid() in launchers]


def test_a_lost_node_requeues_the_job(unbroken: Job, arguments: Arguments, tmp_path: Path) -> None:
    """A node's daemon is killed: SLURM requeues the job, and its next attempt resumes from the last checkpoint."""
    job = Job(tmp_path / "job", arguments(checkpoint__every_steps=1), holds=True)
    job.variables = {"OBLR_DRY_RUN": "0", "OBLR_PREFLIGHT": "0"}
    with job.submitted():
        job.wait_held()
        with killed(f"slurmd.{NODES[1]}", str(ROOT / "tests/net/hosts.sh"), "--on", NODES[1], "slurmd"):
            job.wait_for(lambda: job.shown("Restarts") == "1" or job.state() == "PENDING")
        job.hold.unlink()
        assert job.wait_end() == 0, job.output()
    assert f"job {job.id}, attempt 1," in job.output() and job.status().state == "finished"
    assert "continues after step" in "".join(job.log(f"node_{node}.log", attempt=1) for node in (0, 1))
    assert_equal(job, unbroken)


@contextmanager
def killed(daemon: str, *start: str) -> Iterator[None]:
    """Kill a daemon, and start it again after the block."""
    os.kill(int((Path(os.environ["OBLR_TEST_SLURM"]) / f"{daemon}.pid").read_text()), signal.SIGKILL)
    try:
        yield
    finally:
        subprocess.run(start, check=True, timeout=600)


def test_a_controller_that_is_away_while_a_job_asks_for_its_requeue(
    unbroken: Job, arguments: Arguments, tmp_path: Path
) -> None:
    """It is killed in the middle of a step, and started again when the job has asked for a while."""
    job = Job(tmp_path / "job", arguments(checkpoint__every_steps=0), holds=True)
    job.variables = {"OBLR_DRY_RUN": "0", "OBLR_PREFLIGHT": "0"}
    with job.submitted():
        job.wait_held()
        slurm("scancel", "--batch", "--signal=USR1", job.id)
        job.wait_for(lambda: "SIGUSR1: asking the run" in job.output(), alive=True)
        with killed("slurmctld", "slurmctld"):
            job.hold.unlink()
            job.wait_for(lambda: "the job is requeued" in job.output())
            time.sleep(AWAY_S)
        assert job.wait_end() == 0, job.output()
    assert job.shown("Restarts") == "1" and job.status().state == "finished"
    assert_equal(job, unbroken)


def test_lost_packets_between_the_nodes_change_nothing(unbroken: Job, arguments: Arguments, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", arguments(), holds=True, variables={"OBLR_DRY_RUN": "0", "OBLR_PREFLIGHT": "0"})
    with job.submitted():
        job.wait_held()
        with Host(NODES[1]).cut("drop"):
            job.hold.unlink()
            time.sleep(3)
        assert job.wait_end() == 0, job.output()
    assert job.shown("Restarts") == "0"
    assert_equal(job, unbroken)


@pytest.mark.parametrize("alone", [False, True], ids=["from_each_other", "one_from_all"])
def test_nodes_that_stay_apart_end_the_job_or_requeue_it(
    unbroken: Job, arguments: Arguments, tmp_path: Path, alone: bool
) -> None:
    """The nodes from each other, or the second one from the controller as well, until the attempt has ended."""
    deadlines = {"rollout__generate_timeout_s": 30, "rollout__push_timeout_s": 15}
    deadlines |= {"reward__timeout_s": 20, "reward__num_workers": 8}  # ranks wait for 32 calls one after another
    keys = arguments(checkpoint__every_steps=1, parallel__distributed_timeout_s=20, **deadlines)
    job = Job(tmp_path / "job", keys, holds=True, variables={"OBLR_DRY_RUN": "0", "OBLR_PREFLIGHT": "0"})
    first, second = map(Host, NODES)
    with job.submitted():
        job.wait_held()
        with second.cut("drop", peer=None if alone else first):
            job.hold.unlink()
            job.wait_for(lambda: job.state() in {*ENDED, "PENDING"} or job.shown("Restarts") == "1")
        status = job.wait_end()
    requeued = job.shown("Restarts") == "1"
    assert status == (0 if requeued else 1), job.output()
    if not requeued:
        assert "error: the run failed" in job.output() and "Traceback" not in job.output()
        assert "for the other ranks" in job.output() and f"no report of: {NODES[1]}\n" in job.output()
        job.holds = False
        assert job.run() == 0, job.output()
    assert "continues after step" in "".join(path.read_text() for path in job.logs.glob("attempt_*/node_*.log"))
    assert_equal(job, unbroken)


def test_a_cancelled_job_saves_and_stays_cancelled(arguments: Arguments, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", arguments(checkpoint__every_steps=0), holds=True)
    job.variables = {"OBLR_DRY_RUN": "0", "OBLR_PREFLIGHT": "0"}
    with job.submitted():
        job.wait_held()
        slurm("scancel", job.id)
        job.wait_for(lambda: "SIGTERM: saving" in job.log("node_0.log"))
        job.hold.unlink()
        job.wait_end()
    assert job.state() == "CANCELLED" and job.shown("Restarts") == "0"
    found = job.status()
    assert (found.state, found.step, found.reason) == ("stopped", HELD_AFTER + 1, "SIGTERM"), job.output()
    assert (job.run_dir / "checkpoints" / f"step_{HELD_AFTER + 1:08d}").is_dir()


def test_a_bad_config_is_refused_by_the_dry_run(arguments: Arguments, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", arguments(group_size=1, algo__baseline="optimal"))
    assert job.run() == 2, job.output()
    assert job.state() == "FAILED" and job.shown("Restarts") == "0"
    assert "group_size is 1" in job.output() and "Fix:" in job.output()
    assert_nothing_was_begun(job, "the dry run")


def test_problems_of_a_single_node_are_found_before_training(tiny: Path, arguments: Arguments, tmp_path: Path) -> None:
    """The second node sees a truncated shard and another version of megatron-core."""
    for name in NODES:
        shutil.copytree(tiny / "model", tmp_path / name / "model")
    shard = tmp_path / NODES[1] / "model" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    other = tmp_path / "other" / "megatron_core-0.17.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.17.0\n")
    job = Job(tmp_path / "job", arguments(model__path="model"), variables={"OBLR_DRY_RUN": "0"})
    wrap_python(
        job, f'cd "{tmp_path}/$node"', f'[[ $node == {NODES[0]} ]] || export PYTHONPATH="{other.parent}:{ROOT}"'
    )
    assert job.run() == 2, job.output()
    said = job.output()
    assert said.count("error: node ") == said.count(f"error: node {NODES[1]}: ") == 2, said
    assert "the file is cut off" in said and "megatron-core is 0.17.0, but" in said
    assert_nothing_was_begun(job, "the preflight")


def test_a_node_that_never_comes_is_named(arguments: Arguments, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", arguments(), variables={"OBLR_DRY_RUN": "0", "OBLR_PREFLIGHT_S": "2"})
    wrap_python(job, f"[[ $node == {NODES[0]} ]] || exec sleep 3600")
    assert job.run() == 2, job.output()
    assert f"error: node {NODES[1]}: no report within 2 s" in job.output()
    assert_nothing_was_begun(job, "the preflight")


def wrap_python(job: Job, *lines: str) -> None:
    """Let the job's tasks run these lines of bash before Python; they may use $node."""
    bin_dir = job.directory / "venv" / "bin"
    bin_dir.mkdir(parents=True)
    wrapper = bin_dir / "python"
    wrapper.write_text(
        "\n".join(["#!/usr/bin/env bash", "node=$SLURMD_NODENAME", *lines, f'exec {sys.executable} "$@"', ""])
    )
    wrapper.chmod(0o755)
    job.variables |= {"OBLR_VENV": str(bin_dir.parent)}


def assert_nothing_was_begun(job: Job, by: str) -> None:
    assert f"{by} failed" in job.output() and "not requeued" in job.output()
    assert not job.run_dir.exists() and not list(job.logs.glob("attempt_*/node_*.log"))
    assert [path.name for path in job.logs.iterdir()] == ["attempt_0"]


def test_a_job_too_short_for_its_margin_says_so_and_is_not_requeued(arguments: Arguments, tmp_path: Path) -> None:
    """The header's margin is 600 s. The run's own, 900 s, is refused; sbatch's --signal keeps SLURM's away."""
    job = Job(tmp_path / "job", arguments(checkpoint__exit_before_timeout_s=900), options=["--time=10"])
    job.options.append("--signal=B:USR1@10")
    job.variables = {"OBLR_DRY_RUN": "0", "OBLR_PREFLIGHT": "0"}
    assert job.run() == 2, job.output()
    assert "asks for a signal 600 s before the end" in job.output()
    assert "checkpoint.exit_before_timeout_s = 900" in job.output()
    assert job.shown("Restarts") == "0" and not (job.run_dir / "metrics.jsonl").exists()


def test_trainers_and_servers_on_nodes_of_their_own(arguments: Arguments, tmp_path: Path) -> None:
    """A heterogeneous job, requeued once: one rank on the first node, one server on the second, started again."""
    keys = arguments(rollout__num_threads=1, checkpoint__every_steps=0)
    job = Job(tmp_path / "job", ["qwen3_0.6b", *keys], script="slurm/oblr_servers.sh", holds=True)
    with job.submitted():
        job.wait_held()
        (server,) = job.processes("oblr_megatron.cli")
        server.kill()
        job.wait_for(lambda: "SIGKILL); it is started again" in job.log("server_0.log"), alive=True)
        slurm("scancel", "--batch", "--signal=USR1", job.id)
        job.wait_for(lambda: "SIGUSR1: asking the run" in job.output(), alive=True)
        job.hold.unlink()
        assert job.wait_end() == 0, job.output()
    assert f"step {HELD_AFTER + 1} is saved: the job is requeued" in job.output()
    assert all("1 servers are ready" in job.log("servers.log", attempt) for attempt in (0, 1))
    steps = certain(job.run_dir)
    assert [step["weights/version"] for step in steps] == [1, 2, 3, 4]
    assert all(step["rollout/logprob_abs_diff"] <= 1e-3 for step in steps)
    (url,) = json.loads((job.run_dir / "config.json").read_text())["rollout"]["servers"]
    assert url.startswith(f"http://{NODES[1]}:")
    assert "\nerror:" not in job.output()  # SLURM's own lines about the requeue begin with slurmstepd
