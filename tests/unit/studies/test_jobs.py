"""Runs as processes: complete ones reused, interrupted ones restarted, failures named, what a killed study leaves.

The processes are real and run the fake backend of tests/unit/studies/runs.py. test_command.py runs the toy trainer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oblr_megatron.errors import UserError
from studies.jobs import Job, to_do
from studies.results import is_whole, read_result
from studies.start import prepare
from studies.toy_trainer import ToyConfig
from tests.unit.studies.runs import job_of, key_of, run, write_run
from tests.unit.waiting import until

ROOT = Path(__file__).parents[3]


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that tells the fake backend how to fail, by run directory."""
    path = tmp_path / "orders.json"
    path.write_text("{}")
    monkeypatch.setenv("ORDERS", str(path))
    return path


def test_runs_are_done_once(tmp_path: Path) -> None:
    jobs = [job_of(tmp_path, seed) for seed in range(3)]
    ended, failed = run([*jobs, *jobs])
    assert not failed and len(ended) == 3
    result = read_result(key_of("sums", "rloo", 1e-3, 2), tmp_path)
    assert result is not None and result.final == pytest.approx(0.702) and result.auc == pytest.approx(0.452)
    assert to_do(jobs) == []


def test_a_complete_run_is_kept_and_an_interrupted_one_restarted(tmp_path: Path) -> None:
    whole = write_run(tmp_path, key_of("sums", "rloo", 1e-3, 0), [0.1] * 5)
    cut = write_run(tmp_path, key_of("sums", "rloo", 1e-3, 1), [0.1] * 5, cut=True)
    (cut / "leftover").touch()
    ended, failed = run([job_of(tmp_path, seed) for seed in (0, 1)])
    assert [each.job.key.seed for each in ended] == [1] and not failed
    assert not (cut / "leftover").exists() and is_whole(cut, "toy", 4)
    assert "0.1," in (whole / "metrics.jsonl").read_text()


def test_a_truncated_last_line_is_not_the_last_step(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, key_of("sums", "rloo", 1e-3, 0), [0.1] * 5)
    text = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text(text[:-20])
    assert not is_whole(run_dir, "toy", 4)


@pytest.mark.parametrize("step", [0, 4])
def test_a_run_without_its_first_or_last_evaluation_is_incomplete(step: int, tmp_path: Path) -> None:
    """As when every reward of the evaluation failed; a study then goes on with its other runs."""
    run_dir = write_run(tmp_path, key_of("sums", "rloo", 1e-3, 0), [0.1] * 5)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    del records[step]["eval/sums/mean_at_k"]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert not is_whole(run_dir, "toy", 4)
    assert read_result(key_of("sums", "rloo", 1e-3, 0), tmp_path) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"optimizer": {"lr": 2e-3}}, "optimizer.lr is 0.001, the plan asks for 0.002"),
        ({"num_prompts": 8}, "num_prompts is absent, the plan asks for 8"),
        ({"algo": {}}, "algo.baseline is 'rloo', the plan asks for absent"),
    ],
)
def test_a_complete_run_of_another_config_stops_the_study(tmp_path: Path, change: dict, named: str) -> None:
    write_run(tmp_path, key_of("sums", "rloo", 1e-3, 0), [0.1] * 5)
    with pytest.raises(UserError) as caught:
        to_do([job_of(tmp_path, 0, **change)])
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_an_interrupted_run_of_another_config_is_restarted(tmp_path: Path) -> None:
    write_run(tmp_path, key_of("sums", "rloo", 1e-3, 0), [0.1] * 5, cut=True)
    assert len(to_do([job_of(tmp_path, 0, optimizer={"lr": 2e-3})])) == 1


def test_a_study_that_was_moved_is_the_same(tmp_path: Path) -> None:
    write_run(tmp_path, key_of("sums", "rloo", 1e-3, 0), [0.1] * 5)
    moved = tmp_path.with_name(tmp_path.name + "-moved")
    tmp_path.rename(moved)
    assert to_do([job_of(moved, 0)]) == []


def test_a_directory_that_holds_something_else_is_not_removed(tmp_path: Path) -> None:
    run_dir = key_of("sums", "rloo", 1e-3, 0).run_dir(tmp_path)
    run_dir.mkdir(parents=True)
    (run_dir / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"asked\.json.*seed0\]"):
        to_do([job_of(tmp_path, 0)])
    assert (run_dir / "thesis.tex").exists()


def test_failures_are_named_and_other_runs_continue(tmp_path: Path, orders: Path) -> None:
    orders.write_text(json.dumps({"seed0": {"fail": 2}, "seed1": {"die": 3}, "seed2": {"wait": 1}}))
    jobs = [job_of(tmp_path, seed) for seed in range(4)]
    ended, failed = run(jobs, deadline_s=12.0)
    faults = {str(each.job.key): each.fault for each in failed}
    assert faults == {
        "sums rloo 16x8 lr 0.001 seed 0": "status 1: error: it diverged",
        "sums rloo 16x8 lr 0.001 seed 1": "SIGKILL: it printed nothing",
        "sums rloo 16x8 lr 0.001 seed 2": "ran past its deadline of 12 s",
    }
    assert [each.job.key.seed for each in ended if not each.fault] == [3]
    orders.write_text("{}")
    ended, failed = run(jobs)
    assert len(ended) == 3 and not failed


STUDY = """
import signal
import sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test suite in the background ignores SIGINT
sys.path.insert(0, sys.argv[2])
from tests.unit.studies.runs import job_of, run
run([job_of(Path(sys.argv[1]), seed) for seed in (0, 1)])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_study_ends_its_runs_and_keeps_the_finished_ones(
    tmp_path: Path, orders: Path, number: signal.Signals
) -> None:
    orders.write_text(json.dumps({"seed1": {"wait": 2}}))
    first, second = (key_of("sums", "rloo", 1e-3, seed).run_dir(tmp_path) for seed in (0, 1))
    study = subprocess.Popen([sys.executable, "-c", STUDY, str(tmp_path), str(ROOT)], stderr=subprocess.DEVNULL)
    until(lambda: is_whole(first, "toy", 4) and '"step": 1' in read(second / "metrics.jsonl"))
    os.kill(study.pid, number)
    assert study.wait(20) != 0
    until(lambda: not processes_in(second))
    assert is_whole(first, "toy", 4) and not is_whole(second, "toy", 4)
    orders.write_text("{}")
    ended, failed = run([job_of(tmp_path, seed) for seed in (0, 1)])
    assert [each.job.key.seed for each in ended] == [1] and not failed


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def processes_in(run_dir: Path) -> list[str]:
    """Command lines of processes that name the run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:  # the process has ended
            continue
    return [line for line in found if str(run_dir) in line]


TOY_STUDY = """
import json
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from studies.jobs import Job
from tests.unit.studies.runs import key_of, run
run([Job(key_of("brackets", "rloo", 1e-3, 0), Path(sys.argv[2]), "toy", json.loads(sys.argv[3]))])
"""


def test_a_killed_study_leaves_no_forked_run(tmp_path: Path) -> None:
    start = prepare("brackets", "middle", tmp_path / "starts", steps=2)
    job = toy_job(tmp_path, start, 0, 10_000)
    log = job.run_dir / "log.txt"
    words = [str(ROOT), str(job.run_dir), json.dumps(job.config)]
    study = subprocess.Popen([sys.executable, "-c", TOY_STUDY, *words])
    until(lambda: '"step": 1' in read(log.parent / "metrics.jsonl") and bool(writers(log)), 120)
    study.kill()
    assert study.wait(20) == -signal.SIGKILL
    until(lambda: not writers(log))


def writers(log: Path) -> list[str]:
    """Ids of the processes that write to this log. A forked run's command line does not name the run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            found += [path.parts[2]] * (path.readlink() == log)
        except OSError:  # the process has ended
            continue
    return found


def test_toy_runs_are_forks_with_logs_and_deadlines(tmp_path: Path) -> None:
    """One run completes, one passes its deadline, one has a config that the toy trainer refuses.

    The endless run comes last: by then the fork server has imported the toy trainer.
    """
    start = prepare("brackets", "middle", tmp_path / "starts", steps=2)
    whole, endless, wrong = (toy_job(tmp_path, start, seed, steps) for seed, steps in ((0, 1), (1, 10_000), (2, 1)))
    wrong.config["num_prompts"] = 3
    ended, _ = run([whole, wrong])
    (late,), _ = run([endless], deadline_s=8.0)
    faults = {each.job.key.seed: each.fault for each in ended}
    assert faults[0] == "" and is_whole(whole.run_dir, "toy", 1)
    assert late.fault == "ran past its deadline of 8 s" and not processes_in(endless.run_dir)
    assert (endless.run_dir / "log.txt").exists(), "the run had started"
    assert faults[2].startswith("status 2: error: ") and "num_prompts 3" in faults[2]


def toy_job(out: Path, start: Path, seed: int, num_steps: int) -> Job:
    """A job as a study creates it."""
    key = key_of("brackets", "rloo", 1e-3, seed)
    config = ToyConfig(
        task="brackets", start_dir=start, run_dir=key.run_dir(out), num_steps=num_steps, num_prompts=4, group_size=2
    )
    return Job(key, key.run_dir(out), "toy", config.model_dump(mode="json"))
