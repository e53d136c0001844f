"""The end of an attempt of a job script: lib.sh's functions with a prepared outcome of the run.

tests/e2e/test_slurm.py covers the runs and signals that lead to these outcomes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.checkpoint.resume import check_no_progress
from oblr_megatron.errors import UserError
from oblr_megatron.observe.status import State, Status, write_status

ROOT = Path(__file__).resolve().parents[4]
END = """
source slurm/lib.sh
run_dir="$1/run" log_root="$1/logs" logs="$1/logs/attempt_0" stopping="$2" margin="$4" SECONDS="$5"
if [[ $stopping ]]; then oblr_signal "$stopping"; fi
oblr_end "$3"
"""
SCONTROL = """#!/usr/bin/env bash
[[ $* == "requeue 5" || $* == "requeue 4_1" ]] && touch "$(dirname "$0")/requeue"
"""


def ended(
    directory: Path,
    status: int,
    state: State | None,
    reason: str = "",
    *,
    stopping: str = "",
    saved: tuple[int, ...] = (),
    sampled: tuple[int, ...] = (),
    before: int | None = None,
    margin: int = 0,
    seconds: int = 100,
    output: str = "",
    metrics: Path | None = None,
    **settings: str,
) -> tuple[int, bool, str]:
    """(the script's status, whether it asked for a requeue, its output) after an attempt.

    Args:
        directory: empty.
        status: of the training's srun.
        state: in status.json; None: there is no status.json.
        reason: in status.json.
        stopping: name of the signal that the script received.
        saved: steps of the existing checkpoints.
        sampled: steps of a run that only samples.
        before: the step saved at the last requeue.
        margin: of --signal, if the job's time is not longer; 0 otherwise.
        seconds: since the start of the script when the signal comes.
        output: file for the script's own output, in place of the result's.
        metrics: copied into the run.
        settings: environment variables.
    """
    (directory / "run").mkdir()
    if metrics is not None:
        shutil.copy(metrics, directory / "run" / "metrics.jsonl")
    (directory / "logs" / "attempt_0").mkdir(parents=True)
    for step in saved:
        (directory / "run" / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    for step in sampled:
        (directory / "run" / "config.json").write_text(json.dumps({"rollout": {"only": True}}, indent=2))
        (directory / "run" / "rollouts").mkdir(exist_ok=True)
        (directory / "run" / "rollouts" / f"step_{step:06d}.parquet").touch()
    if state is not None:
        write_status(directory / "run", Status(state, 7, 9, reason, 0.0))
    if before is not None:
        (directory / "logs" / "requeues").write_text(f"{before}\n")
    (directory / "scontrol").write_text(SCONTROL)
    (directory / "scontrol").chmod(0o755)
    own = {"SLURM_JOB_ID": "5", "PATH": f"{directory}:{os.environ['PATH']}"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OBLR_"))}
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"exec &> {output}\n{END}" if output else END,
            "job",
            str(directory),
            stopping,
            str(status),
            str(margin),
            str(seconds),
        ],
        cwd=ROOT,
        env=kept | own | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, (directory / "requeue").exists(), done.stdout + done.stderr


CANCELLED: dict[str, Any] = {"reason": "SIGTERM", "stopping": "TERM", "saved": (7,)}
FAILED: dict[str, Any] = {"reason": "RunError: no engine", "saved": (7,)}
ENDS: dict[str, tuple[int, State | None, dict[str, Any], tuple[int, bool]]] = {
    # status of srun, state of the run, further arguments of `ended`, status of the script and whether it is requeued
    "finished": (0, "finished", {"stopping": "USR1"}, (0, False)),
    "finished, a late signal": (138, "finished", {"stopping": "USR1"}, (0, False)),
    "stopped, a late signal": (138, "stopped", {"reason": "the time limit", "stopping": "USR1"}, (0, True)),
    "stopped, then a failure": (1, "stopped", {"reason": "the time limit"}, (1, False)),
    "cancelled": (0, "stopped", CANCELLED, (0, False)),  # or preempted: SLURM itself requeues such jobs
    "cancelled, killed": (1, "running", CANCELLED, (1, False)),
    "wrong input": (2, None, {"stopping": "USR1", "OBLR_REQUEUE_FAILED": "1"}, (2, False)),
    "a signal before the first step": (138, None, {"stopping": "USR1"}, (0, True)),
    "rank 0 is killed while it saves": (1, "running", {"stopping": "USR1", "saved": (7,)}, (1, False)),
    "a failed save": (1, "failed", {"reason": "RunError: no room", "stopping": "USR1"}, (1, False)),
    "a failure": (1, "failed", FAILED, (1, False)),
    "a failure, asked": (1, "failed", FAILED | {"OBLR_REQUEUE_FAILED": "1"}, (0, True)),
    "a failure, off": (1, "failed", FAILED | {"OBLR_REQUEUE_FAILED": "1", "OBLR_REQUEUE": "0"}, (1, False)),
}


@pytest.mark.parametrize("case", ENDS)
def test_an_attempt_ends_with_a_requeue_or_without(tmp_path: Path, case: str) -> None:
    status, state, options, expected = ENDS[case]
    assert ended(tmp_path, status, state, **options)[:2] == expected


@pytest.mark.parametrize("reason", ["SIGUSR1", "the time limit"])
def test_a_stopped_run_is_requeued(tmp_path: Path, reason: str) -> None:
    status, requeued, said = ended(tmp_path, 0, "stopped", reason, saved=(5, 10), before=5)
    assert (status, requeued) == (0, True) and reason in said and "step 10 is saved" in said
    assert (tmp_path / "logs" / "requeues").read_text() == "5\n10\n"


def test_a_task_of_an_array_requeues_itself_alone(tmp_path: Path) -> None:
    """The job id of the last task is the array's, and would requeue all of it."""
    array = {"SLURM_ARRAY_JOB_ID": "4", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "4"}
    assert ended(tmp_path, 0, "stopped", "SIGUSR1", saved=(5,), **array)[:2] == (0, True)


def test_a_job_that_an_arrays_task_submitted_requeues_itself(tmp_path: Path) -> None:
    """sbatch copies the variables of the task."""
    array = {"SLURM_ARRAY_JOB_ID": "4", "SLURM_ARRAY_TASK_ID": "1"}
    assert ended(tmp_path, 0, "stopped", "SIGUSR1", saved=(5,), **array)[:2] == (0, True)


def test_a_full_disk_under_the_jobs_output_does_not_end_the_requeue(tmp_path: Path) -> None:
    assert ended(tmp_path, 0, "stopped", "SIGUSR1", saved=(5,), output="/dev/full")[:2] == (0, True)


def test_logs_that_cannot_be_written_do_not_stop_a_requeue(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "requeues").symlink_to("/proc/nothing")
    status, requeued, said = ended(tmp_path, 0, "stopped", "SIGUSR1", saved=(5,))
    assert (status, requeued) == (0, True) and "warning: cannot note the requeue" in said


def test_a_job_without_progress_is_not_requeued(tmp_path: Path) -> None:
    status, requeued, said = ended(tmp_path, 0, "stopped", "SIGUSR1", saved=(10,), before=10)
    assert (status, requeued) == (1, False) and "no progress beyond step 10" in said


def test_a_job_that_gets_its_signal_at_once_is_not_requeued(tmp_path: Path) -> None:
    """Its time is not longer than the margin of --signal, so every attempt would do one step at most."""
    for name, margin, seconds, expected in (
        ("at once", 600, 20, (2, False)),
        ("later", 600, 50, (0, True)),  # sbatch was given a shorter margin than the script's header
        ("long", 0, 20, (0, True)),  # preempted
    ):
        (tmp_path / name).mkdir()
        ending = ended(
            tmp_path / name, 0, "stopped", "SIGUSR1", stopping="USR1", saved=(1,), margin=margin, seconds=seconds
        )
        assert ending[:2] == expected, ending
        assert ("Fix: sbatch --time" in ending[2]) == (expected[0] == 2)


def test_the_script_reads_the_runs_status(tmp_path: Path) -> None:
    """`oblr_field` of every key; a reason may contain anything except quotes and commas."""
    written = Status("failed", 12, 500, "RunError: rank 0 waited 60 s [x]; y", 1.5)
    write_status(tmp_path, written)
    script = 'source slurm/lib.sh; run_dir="$1"; for name in "${@:2}"; do oblr_field "$name"; done'
    command = ["bash", "-c", script, "job", str(tmp_path), *asdict(written)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(value) for value in asdict(written).values()]


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (['run_dir="20261125"'], "20261125"),
        (["run_dir='a b'", "seed=1"], "a b"),
        (['run_dir="a"', "run_dir=runs/b"], "runs/b"),
        (['run_dir="'], '"'),
        (["run_dir = runs/old", "seed=1"], "runs/old"),
        (["  run_dir\t= a b "], "a b"),
        (["run_dir="], ""),
        (["run_directory=1"], "runs/small-5"),
        ([], "runs/small-5"),
    ],
)
def test_a_run_directory_in_quotes_is_found(given: list[str], path: str) -> None:
    """The script's own paths have no quotes; the config needs them around a name of digits."""
    script = 'job_name=small SLURM_JOB_ID=5; source slurm/lib.sh; oblr_overrides "$@"; echo "$run_dir"; '
    command = ["bash", "-c", script + 'printf "%s\\n" "${overrides[@]}"', "job", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found, *overrides = done.stdout.splitlines()
    last = next((word for word in reversed(given) if word.startswith("run_dir=")), f"run_dir={path}")
    assert found == path and overrides[-1] == last


BEGIN = """
source slurm/lib.sh
for step in overrides time margin cpu_bind python environment ports; do eval "oblr_$step() { run_dir=; }"; done
oblr_begin
echo "$log_root"
"""


@pytest.mark.parametrize("shared", [False, True])
def test_jobs_that_share_a_directory_of_logs_have_their_own(tmp_path: Path, shared: bool) -> None:
    """The file of requeues is there, and a step of one job says nothing about another."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node1\n")
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "config.toml").touch()
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OBLR_HOME": str(tmp_path), "OBLR_CONFIG": "config.toml"}
    job = {"SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "small", "SLURM_JOB_NODELIST": "node1"}
    logs = {"OBLR_LOGS": str(tmp_path / "all")} if shared else {}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OBLR_"))}
    done = subprocess.run(
        ["bash", "-c", BEGIN], cwd=ROOT, env=kept | own | job | logs, capture_output=True, text=True, check=True
    )
    root = Path(done.stdout.splitlines()[-1])
    assert root == (tmp_path / "all" if shared else Path()) / "small-5.logs"
    assert (tmp_path / root / "attempt_0").is_dir()


@pytest.mark.parametrize(("before", "requeued"), [(3, True), (12, False)])
def test_saved_samples_are_the_progress_of_a_run_that_only_samples(before: int, requeued: bool, tmp_path: Path) -> None:
    outcome = ended(tmp_path, 0, "stopped", "SIGUSR1", stopping="USR1", sampled=(9, 12), before=before)
    assert outcome[:2] == ((0, True) if requeued else (1, False)) and "step 12" in outcome[2]


@pytest.mark.parametrize(
    ("attempt", "present", "steps", "over"),
    [
        (1, (), 3, True),
        (2, ("run/rollouts/step_000003.parquet",), 3, True),  # of a run that trains; they are written again
        (0, (), 3, False),  # not a requeue: the user resumes by hand
        (1, ("run/checkpoints/step_00000002/x",), 3, False),
        (1, ("run/hf/x",), 3, False),
        (1, ("run/hf_best/x",), 3, False),
        (1, (), 0, False),  # only the evaluation before the first step
    ],
)
def test_a_requeued_run_without_a_checkpoint_starts_over(
    tmp_path: Path, attempt: int, present: tuple[str, ...], steps: int, over: bool
) -> None:
    """For example when a node was lost before the first save; what is moved is what `resume` refuses."""
    started_over(tmp_path, attempt, ("logs/attempt_0/node_0.log", *present), steps, over)
    if over:
        check_no_progress(tmp_path / "run")


def test_a_requeued_job_that_never_trained_leaves_the_run_of_an_earlier_one(tmp_path: Path) -> None:
    started_over(tmp_path, 1, (), 3, False)
    with pytest.raises(UserError, match="come to step 3"):
        check_no_progress(tmp_path / "run")


def started_over(directory: Path, attempt: int, present: tuple[str, ...], steps: int, over: bool) -> None:
    """Check whether the script puts the records of a run with these files and steps aside."""
    for name in ("run/metrics.jsonl", "logs/attempt_0/dry_run.log", *present):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    text = "".join(f'{{"step": {step}, "reward/mean": 0.5}}\n' for step in range(steps + 1))
    (directory / "run" / "metrics.jsonl").write_text(text)
    script = 'source slurm/lib.sh; run_dir="$1/run" log_root="$1/logs" attempt="$2" SLURM_JOB_ID=5; oblr_start_over'
    command = ["bash", "-c", script, "job", str(directory), str(attempt)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kept = directory / "run" / (f"metrics_before_5-{attempt}.jsonl" if over else "metrics.jsonl")
    assert kept.read_text() == text and (directory / "run" / "metrics.jsonl").exists() != over
    assert said.count("\n") == over and (f"{steps} steps are done again" in said) == over


@pytest.mark.parametrize("saved", [(), (20,)])
def test_a_failed_run_is_resumed_from_a_checkpoint_only(tmp_path: Path, saved: tuple[int, ...]) -> None:
    """Without one, the next job with this run_dir would be refused: `check_no_progress`."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 0}\n{"step": 5, "reward/mean": 0.5}\n')
    status, requeued, said = ended(tmp_path, 1, "failed", "RunError: no engine", saved=saved, metrics=metrics)
    assert (status, requeued) == (1, False) and ("resume with: sbatch ... run_dir=" in said) == bool(saved)
    assert ("no checkpoint: start again without run_dir" in said) != bool(saved)
