"""Executes the job scripts of slurm/ under the stand-in for sbatch, srun and scontrol of tests/slurm/.

Two nodes, which are names of this machine, run one CPU rank each. Samples are replayed, except in the test of servers.
Dry run, preflight, rendezvous, ranks, signals, checkpoints and requeues are real. Not covered: SLURM itself,
containers, GPUs, NCCL.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed.replayed import STEPS, certain, exported, make_inputs
from tests.slurm.job import Job

pytestmark = pytest.mark.nightly
TEMPLATE = """
num_steps = 8
num_prompts = 4
group_size = 4
run_dir = "unused"
model = {{path = "{model}", make_vocab_size_divisible_by = 8}}
data = {{train = "none", max_prompt_tokens = 16}}
rollout = {{replay = "{inputs}/rollouts", max_response_tokens = 16, importance_sampling = "none"}}
reward = {{name = "tests.slurm.rewards:slow_match", num_workers = 1}}
gradnorm = {{mode = "bookkeep"}}
algo = {{snr = {{num_folds = 2, warmup_steps = 2}}}}
optimizer = {{lr = 1e-2}}
checkpoint = {{every_steps = 0, exit_before_timeout_s = 60}}
log = {{console = "plain", tensorboard = false}}
"""


def write_config(inputs: Path, model: str) -> Path:
    path = inputs / f"{Path(model).name}.toml"
    path.write_text(TEMPLATE.format(inputs=inputs, model=model))
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("slurm"))


@pytest.fixture(scope="module")
def config(inputs: Path) -> Path:
    return write_config(inputs, str(inputs / "model"))


@pytest.fixture(scope="module")
def unbroken(inputs: Path, config: Path) -> Job:
    job = Job(inputs / "unbroken", config, arguments=["seed=1"], variables={"OBLR_DRY_RUN": "1"})
    assert job.run() == 0, job.output()
    return job


def test_a_job_from_the_dry_run_to_the_last_step(unbroken: Job) -> None:
    said = unbroken.output()
    assert "job 4711, attempt 0, 2 nodes x 1 ranks: 127.0.0.1 127.0.0.2" in said
    assert json.loads(unbroken.log("dry_run.log").splitlines()[-1])["world_size"] == 2
    table = unbroken.log("preflight.log")
    assert "preflight: 2 nodes ready" in table and table.count(" ok") == 2
    assert f"finished after step {STEPS}: {unbroken.run_dir}" in said
    ended = {"state": "finished", "step": STEPS, "num_steps": STEPS, "reason": ""}
    assert {name: unbroken.status()[name] for name in ended} == ended
    assert json.loads((unbroken.run_dir / "config.json").read_text())["seed"] == 1, "overrides come through"
    assert len(certain(unbroken.run_dir)) == STEPS


def test_a_job_out_of_time_is_requeued_and_ends_as_the_unbroken_one(unbroken: Job, tmp_path: Path) -> None:
    """Only the batch script receives SIGUSR1, as with `--signal=B:USR1@...`."""
    job = Job(tmp_path / "job", unbroken.config, arguments=["seed=1"], variables={"OBLR_PREFLIGHT": "0"})
    with job.submitted() as process:
        metrics = job.run_dir / "metrics.jsonl"
        job.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, process)
        job.signal(signal.SIGUSR1)
        job.wait_for((job.logs / "attempt_1" / "node_0.log").exists, process)
        saved = int((job.logs / "requeues").read_text())
        assert 2 <= saved < STEPS
        process.communicate(timeout=200)
    assert process.returncode == 0, job.output()
    said = job.output()
    assert f"stopped (SIGUSR1), step {saved} is saved" in said
    assert "job 4711, attempt 1," in said
    assert f"continues after step {saved}" in job.log("node_0.log", attempt=1) + job.log("node_1.log", attempt=1)
    assert job.status()["state"] == "finished"
    assert certain(job.run_dir) == certain(unbroken.run_dir)
    first, second = exported(job.run_dir), exported(unbroken.run_dir)
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_problems_of_single_nodes_are_found_before_training(inputs: Path, tmp_path: Path) -> None:
    """The second of three nodes has a truncated shard; the third has another megatron-core version."""
    for name in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
        shutil.copytree(inputs / "model", tmp_path / "disks" / name / "own_model")
    shard = tmp_path / "disks" / "127.0.0.2" / "own_model" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    other = tmp_path / "other" / "megatron_core-0.17.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.17.0\n")
    settings = {
        "nodes": "127.0.0.[1-3]",
        "disks": str(tmp_path / "disks"),
        "prolog": {"127.0.0.3": {"PYTHONPATH": str(other.parent)}},
    }
    job = Job(tmp_path / "job", write_config(inputs, "own_model"), settings=settings)
    assert job.run() == 2, job.output()
    said = job.output()
    assert said.count("error: node ") == 2, said
    assert "error: node 127.0.0.2: the file is cut off" in said
    assert "error: node 127.0.0.3: megatron-core is 0.17.0, but 0.16.1 on 127.0.0.1" in said
    assert_nothing_was_begun(job)


def test_a_node_that_never_comes_is_named(config: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", config, settings={"absent": ["127.0.0.2"]}, variables={"OBLR_PREFLIGHT_S": "2"})
    assert job.run() == 2, job.output()
    assert "error: node 127.0.0.2: no report within 2 s" in job.output()
    assert_nothing_was_begun(job)


def assert_nothing_was_begun(job: Job) -> None:
    assert "the preflight failed" in job.output() and "not requeued" in job.output()
    assert not job.run_dir.exists() and not list(job.logs.glob("attempt_*/node_*.log"))
    assert [path.name for path in job.logs.iterdir()] == ["attempt_0"]


def test_a_job_that_saves_nothing_is_requeued_once(config: Path, tmp_path: Path) -> None:
    """The signal comes twice before the ranks start."""
    job = Job(tmp_path / "job", config, variables={"OBLR_PREFLIGHT": "0"})
    with job.submitted() as process:
        for attempt in range(2):
            job.wait_for((job.logs / f"attempt_{attempt}" / "node_1.log").exists, process)
            job.signal(signal.SIGUSR1)
        process.communicate(timeout=200)
    said = job.output()
    assert process.returncode == 1, said
    assert said.count("the job is requeued") == 1
    assert "error: no progress beyond step 0" in said
    assert not (job.logs / "attempt_2").exists()


def test_trainers_and_servers_on_nodes_of_their_own(
    tmp_path: Path, tiny: Path, overrides: Callable[..., list[str]]
) -> None:
    """A heterogeneous job with a real server on its second component and two ranks that sample from it."""
    keys = overrides(tmp_path / "unused", num_steps=2, rollout__num_threads=1)[1:]
    job = Job(
        tmp_path / "job",
        Path("examples/tiny_cpu/config.toml"),
        script="slurm/oblr_qwen3_servers.sh",
        arguments=["0.6b", *keys],
        settings={"server_nodes": "127.0.0.3"},
        variables={"OBLR_PREFLIGHT": "0", "OBLR_SERVERS_S": "240"},
    )
    assert job.run() == 0, job.output()
    assert "1 servers are ready" in job.log("servers.log")
    steps = certain(job.run_dir)
    assert [step["weights/version"] for step in steps][-2:] == [1, 2]
    assert all(step["rollout/logprob_abs_diff"] <= 1e-3 for step in steps if step["step"])
    given = json.loads((job.run_dir / "config.json").read_text())["rollout"]
    assert len(given["servers"]) == 1 and given["servers"][0].startswith("http://127.0.0.3:")
    assert "error:" not in job.output()
