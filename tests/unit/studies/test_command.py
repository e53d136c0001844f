"""`oblr-megatron study curves` from plan to tables: both phases, a repeated call, another plan, toy runs.

Larger studies use the fake backend of tests/unit/studies/runs.py, in real processes. Not covered: TRL (test_trl.py)
and a run of the backend "train"; only its config is checked.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oblr_megatron.checks import packages
from oblr_megatron.cli import main
from oblr_megatron.config import parse_config
from oblr_megatron.errors import EXIT_USER, UserError
from oblr_megatron.metrics import read_metrics
from studies.curves import Curves, write_summary
from studies.plan import load_plan
from studies.results import read_result
from studies.study_command import STUDIES
from studies.summary import summarise
from studies.tasks import TASKS
from tests.unit.studies.runs import key_of, worker
from tests.unit.test_imports import ROOT, loaded_by

SHAPE = (4, 2)
PLAN = """
tasks = ["sums"]
seeds = 2
sweep_seeds = [10]
num_steps = 2
shapes = ["4x2"]
evaluate_every = 1
reference = "ours"
learning_rates = [0.1, 0.01]
[arms.ours]
algo.snr.warmup_steps = 1
[arms.rloo]
peer = true
algo.preset = "rloo"
learning_rates = [0.002]
"""


def plan_at(tmp_path: Path, text: str = PLAN) -> Path:
    path = tmp_path / "plan.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def study_of(tmp_path: Path, text: str = PLAN) -> Curves:
    plan, out = load_plan(plan_at(tmp_path, text)), tmp_path / "out"
    return Curves(plan, out, dict.fromkeys(plan.tasks, out / "start"), processes=2, worker=worker(tmp_path))


def runs_of(out: Path) -> set[str]:
    return {str(path.parent.relative_to(out)) for path in out.rglob("asked.json")}


def test_both_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fake backend is best at 1e-3, so the grid grows towards it, up to grid_extensions."""
    study = study_of(tmp_path)
    study.run()
    assert not study.failed
    assert runs_of(study.out) == {
        *(f"sums/ours/4x2/lr{rate}/seed10" for rate in ("0.1", "0.01", "0.001", "0.0001")),
        *(f"sums/ours/4x2/lr0.001/seed{seed}" for seed in (0, 1)),
        *(f"sums/rloo/4x2/lr0.002/seed{seed}" for seed in (0, 1)),  # one rate: no sweep
    }
    (task,) = summarise(study.plan, study.out)
    assert {arm.arm: (arm.cell.lr, arm.on_edge, len(arm.runs)) for arm in task.arms} == {
        "ours": (0.001, False, 2),
        "rloo": (0.002, False, 2),
    }
    printed = capsys.readouterr().out
    assert "sums ours 4x2 lr 0.001 seed 0  area 0.475  final 0.750" in printed and "sums main 4/4" in printed
    study.run()
    assert capsys.readouterr().out.splitlines() == ["sums sweep: 0 of 4 runs to do", "sums main: 0 of 4 runs to do"]


def test_an_arm_without_a_complete_rate_skips_the_main_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = tmp_path / "orders.json"
    orders.write_text(json.dumps({"seed10": {"fail": 1}}))
    monkeypatch.setenv("ORDERS", str(orders))
    study = study_of(tmp_path)
    study.run()
    assert {str(each.job.key) for each in study.failed} == {
        f"sums ours 4x2 lr {rate} seed 10" for rate in ("0.01", "0.1")
    }
    assert read_result(key_of("sums", "rloo", 0.002, 1, SHAPE), study.out) is not None
    write_summary(study.plan, study.out)
    assert "- sums/ours/4x2/lr0.01/seed10: error: it diverged\n" in (study.out / "summary.md").read_text()
    orders.write_text("{}")
    again = study_of(tmp_path)
    again.run()
    assert not again.failed and read_result(key_of("sums", "ours", 0.001, 1, SHAPE), study.out) is not None


def test_the_same_directory_with_another_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study_of(tmp_path).run()
    changed = PLAN.replace("warmup_steps = 1", "warmup_steps = 2")
    with pytest.raises(UserError, match=r"algo\.snr\.warmup_steps is 1, .* 2"):
        study_of(tmp_path, changed).run()
    assert main(["study", "curves", str(plan_at(tmp_path, changed)), "--out", str(tmp_path / "out"), "--summary"]) == 2
    assert "algo.snr.warmup_steps is 1" in capsys.readouterr().err
    assert main(["study", "curves", str(plan_at(tmp_path)), "--out", str(tmp_path / "out"), "--summary"]) == 0
    assert str(tmp_path / "out/summary.md") in capsys.readouterr().out


def test_tables_over_the_tasks_of_two_studies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The correction of p is over both: with two tasks of p = 0.5 it is 1."""
    command = ["study", "curves", str(plan_at(tmp_path)), "--out", str(tmp_path / "out"), "--summary"]
    study_of(tmp_path).run()
    text = PLAN.replace('"sums"', '"chain"')
    plan = load_plan(plan_at(tmp_path / "other", text))
    other = ["--beside", str(tmp_path / "other/plan.toml"), str(tmp_path / "other/out")]
    assert main([*command, *other]) == 2 and "no complete run" in capsys.readouterr().err
    Curves(plan, tmp_path / "other/out", {"chain": tmp_path}, processes=2, worker=worker(tmp_path)).run()

    assert main([*command, *other]) == 0
    lines = (tmp_path / "out/summary.md").read_text().split("\n\n")[3].splitlines()[2:]
    overview = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(row[0], row[-2], row[-1]) for row in overview] == [("sums", "0.5", "1"), ("chain", "0.5", "1")]
    plan_at(tmp_path / "other", text.replace('reference = "ours"', 'reference = "rloo"'))
    assert main([*command, *other]) == 2 and "its reference is 'rloo'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--jobs", "0"], "--jobs 0"), (["--only", "grop"], "'grop' [--only]"), (["--summary"], "no complete run")],
)
def test_bad_options_end_in_one_line(
    tmp_path: Path, options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "curves", str(plan_at(tmp_path)), "--out", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


def test_two_studies_do_not_share_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["study", "curves", str(plan_at(tmp_path)), "--out", str(tmp_path / "out")]) == 2
    assert str(tmp_path / "out") in capsys.readouterr().err


def test_the_command_line_needs_no_torch() -> None:
    names = [f"studies.{name}" for name in ("study_command", "curves", "jobs", "plan", "summary", "curve_plots")]
    assert loaded_by(names, ("torch", "transformers", "matplotlib", "scipy", "vllm")) == []


def test_an_installed_package_finds_the_studies_of_a_clone_only(tmp_path: Path) -> None:
    """The package alone is copied, as pip installs it."""
    shutil.copytree(ROOT / "oblr_megatron", tmp_path / "site" / "oblr_megatron")

    def study(place: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "oblr_megatron.cli", "study", "curves", "--help"]
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "PYTHONSAFEPATH": "1"}
        return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)

    refused = study(tmp_path)
    assert refused.returncode == EXIT_USER and refused.stderr.count("\n") == 1
    assert "the studies live in the repository" in refused.stderr and "a complete clone" in refused.stderr
    found = study(ROOT)
    assert found.returncode == 0 and "--out" in found.stdout, found.stderr


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_has_help(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["study", study, "--help"])
    assert ended.value.code == 0 and "--out" in capsys.readouterr().out


def test_toy_runs(tmp_path: Path) -> None:
    """A run through worker.py and toy_trainer.py."""
    from studies.start import prepare

    start = prepare("sums", "middle", tmp_path / "start", steps=3)
    text = PLAN.replace("seeds = 2", "seeds = 1").replace("[0.1, 0.01]", "[1e-3]")
    plan = load_plan(plan_at(tmp_path, text)).only(["ours"])
    study = Curves(plan, tmp_path / "out", {"sums": start}, processes=2)
    study.run()
    logs = [path.read_text() for path in study.out.rglob("log.txt")]
    assert not study.failed, [each.fault for each in study.failed] + logs
    (task,) = summarise(plan, study.out)
    assert [(arm.arm, len(arm.runs)) for arm in task.arms] == [("ours", 1)]
    records = read_metrics(key_of("sums", "ours", 1e-3, 0, SHAPE).run_dir(study.out))
    assert [record["step"] for record in records] == [0, 1, 2] and all(record["lr"] > 0 for record in records[1:])
    study.run()
    assert not study.failed and len(runs_of(study.out)) == 1


def test_the_real_stack_gets_the_toy_config(tmp_path: Path) -> None:
    from studies.toy_trainer import ToyConfig
    from studies.train_backend import train_table

    job = study_of(tmp_path, PLAN.replace("peer = true", 'peer = true\nbackend = "train"')).job(
        key_of("sums", "rloo", 0.002, 1, SHAPE)
    )
    toy = ToyConfig.model_validate(job.config)
    config = parse_config(json.loads(json.dumps(train_table(toy))))
    assert (config.seed, config.num_steps, config.num_prompts, config.group_size) == (1, 2, 4, 2)
    assert config.algo.model_dump(exclude={"preset"}) == toy.algo.model_dump(exclude={"preset"})
    assert config.optimizer == toy.optimizer and config.optimizer.lr == 0.002
    assert config.run_dir == job.run_dir / "train" and list(config.evaluate.data) == ["sums"]
    assert config.evaluate.samples_per_prompt == toy.evaluation_samples


def test_rewards_by_name_are_the_tasks() -> None:
    from studies import rewards

    for name, task in TASKS.items():
        generator, rows = random.Random(0), task.rows(num_train=20, num_held_out=1)[0]
        answers = [(task.teach(row, generator, 0.5), row) for row in rows]
        found = [getattr(rewards, name)(answer, row.answer, row.question) for answer, row in answers]
        assert found == [task.reward(answer, row.answer) for answer, row in answers]
        assert min(found) < 1.0 == max(found)
    with pytest.raises(AttributeError):
        _ = rewards.unknown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["task", "walk_signed"], "shifted rewards"),
        (["variance", "--tasks", "sums", "typo"], "'typo'"),
        (["variance", "--group-sizes", "1"], "group of 2"),
        (["variance", "--prompts", "1"], "--prompts"),
        (["scaling", "--cases", "tp2"], "two cases"),
    ],
)
def test_a_study_that_could_not_be_finished_is_refused_before_it_measures(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", *arguments, "--out", str(tmp_path / "out")]) == EXIT_USER
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and named in said[0] and "Fix: " in said[0]


def test_a_study_that_could_not_draw_is_refused_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "matplotlib" else name)
    assert main(["study", "variance", "--out", str(tmp_path / "out")]) == EXIT_USER
    assert "matplotlib is not installed" in capsys.readouterr().err and not (tmp_path / "out").exists()
