"""Runs that live on as lines of rows.jsonl: the same curves and tables in another directory, and damaged files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from oblr_megatron.cli import main
from oblr_megatron.errors import UserError
from studies.curves import Curves
from studies.plan import load_plan
from studies.results import ASKED_FILE, Result, keys_on_disk, read_result
from studies.rows import ROWS_FILE, keep, keep_all, mend, restore, start_digest
from studies.start import STEPS, prepare
from tests.unit.studies.runs import key_of, worker, write_run

EXAMPLES = Path(__file__).parents[3] / "examples/study"
PLAN = """
tasks = ["sums"]
seeds = 2
sweep_seeds = [10]
num_steps = 4
shapes = ["4x2"]
evaluate_every = 2
reference = "ours"
learning_rates = [1e-2, 1e-3]
grid_extensions = 0
[arms.ours]
algo.norm_power = 0.25
algo.baseline = "pooled"
[arms.reinforce_pp]
peer = true
algo.preset = "reinforce_pp"
algo.aggregation = "constant"
"""
SHAPE = (4, 2)


def study_at(out: Path, text: str = PLAN) -> Curves:
    out.parent.mkdir(parents=True, exist_ok=True)
    (out.parent / "plan.toml").write_text(text)
    plan = load_plan(out.parent / "plan.toml")
    return Curves(plan, out, {"sums": out / "start"}, processes=2, worker=worker(out.parent))


def moved(out: Path, to: Path) -> Path:
    """Copy only rows.jsonl."""
    to.mkdir(parents=True)
    shutil.copy(out / ROWS_FILE, to)
    return to


def assert_same(found: Result | None, wanted: Result | None) -> None:
    assert found is not None and wanted is not None
    for name in ("steps", "accuracy", "greedy", "solved", "entropy"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-5)
    assert found.costs == pytest.approx(wanted.costs, rel=1e-5, nan_ok=True)
    assert (found.key, found.num_steps) == (wanted.key, wanted.num_steps)


def test_a_clone_continues_where_the_lines_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = study_at(tmp_path / "here/out")
    study.run()
    assert not study.failed
    plan, clone = study.plan, moved(study.out, tmp_path / "there/out")
    assert restore(plan.only(["ours"]), clone) == 4  # two of ours in the sweep, two in the comparison
    for run in ((1e-2, 10), (1e-3, 10), (1e-3, 0), (1e-3, 1)):
        key = key_of("sums", "ours", *run, SHAPE)
        assert_same(read_result(key, clone), read_result(key, study.out))
    assert restore(plan, clone) == 4 and restore(plan, clone) == 0
    shutil.rmtree(clone / "sums/reinforce_pp")
    lines = (clone / ROWS_FILE).read_text().splitlines(keepends=True)
    (clone / ROWS_FILE).write_text("".join(line for line in lines if '"arm": "reinforce_pp"' not in line))
    again = study_at(clone)
    capsys.readouterr()
    again.run()
    said = [line for line in capsys.readouterr().out.splitlines() if line.endswith("runs to do")]
    assert said == ["sums sweep: 2 of 4 runs to do", "sums main: 2 of 4 runs to do"] and not again.failed
    other = study_at(clone, PLAN.replace("norm_power = 0.25", "norm_power = 0.125"))
    with pytest.raises(UserError, match=r"algo\.norm_power is 0\.25, the plan asks for 0\.125"):
        other.run()


@pytest.mark.parametrize("rows", sorted(EXAMPLES.glob("*/rows.jsonl")), ids=lambda rows: rows.parent.name)
def test_the_kept_rows_are_those_of_todays_plans(rows: Path, tmp_path: Path) -> None:
    """One run of every setting: a key that was renamed or removed would make all of them those of another plan."""
    plan = load_plan(rows.parent.with_suffix(".toml"))
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    kept = [line for line in lines if "settings" in line or line["arm"] in plan.arms]
    first = {line["made"]: line for line in reversed(kept) if "made" in line}
    chosen = [line for line in lines if "settings" in line] + list(first.values())
    (tmp_path / ROWS_FILE).write_text("".join(json.dumps(line) + "\n" for line in chosen))
    assert restore(plan, tmp_path) == len(first) > 0
    Curves(plan, tmp_path, dict.fromkeys(plan.tasks, tmp_path / "start"), processes=1).check()


def test_an_interrupted_restore_leaves_no_half_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would count as a failed cell of the sweep, and another rate would be chosen."""
    study = study_at(tmp_path / "here/out")
    key = key_of("sums", "ours", 1e-3, 0, SHAPE)
    write_run(study.out, key, [0.1, 0.2, 0.3, 0.4, 0.5])
    keep(key, study.out)
    clone = moved(study.out, tmp_path / "there/out")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        restore(study.plan, clone)
    assert not key.run_dir(clone).exists() and not keys_on_disk(study.plan, clone)
    assert restore(study.plan, clone) == 1 and read_result(key, clone) is not None


def test_toy_runs_and_a_preset_that_was_overridden(tmp_path: Path) -> None:
    """The settings of real runs survive, also a key that a preset would set otherwise."""
    text = PLAN.replace("seeds = 2", "seeds = 1").replace("[1e-2, 1e-3]", "[1e-3]")
    (tmp_path / "plan.toml").write_text(text)
    plan = load_plan(tmp_path / "plan.toml")
    start = prepare("sums", "middle", tmp_path / "start", steps=3)
    study = Curves(plan, tmp_path / "out", {"sums": start}, processes=2)
    study.run()
    assert not study.failed
    clone = moved(study.out, tmp_path / "clone")
    assert restore(plan, clone) == 2
    again = Curves(plan, clone, {"sums": start}, processes=2)
    again.check()
    for arm in plan.arms:
        key = key_of("sums", arm, 1e-3, 0, SHAPE)
        assert_same(read_result(key, clone), read_result(key, study.out))
    lines = [json.loads(line) for line in (clone / ROWS_FILE).read_text().splitlines()]
    assert all(line["costs"] if "arm" in line else line["backend"] == "toy" for line in lines) and len(lines) == 4


def test_curves_with_an_evaluation_after_every_step_or_without_entropies(tmp_path: Path) -> None:
    write_run(tmp_path / "a", key_of("sums", "ours", 1e-2, 0), [0.1, 0.2, 0.4])
    (tmp_path / "plan.toml").write_text(PLAN)
    plan, key = load_plan(tmp_path / "plan.toml"), key_of("sums", "ours", 1e-2, 0)
    wanted = read_result(key, tmp_path / "a")
    assert wanted is not None
    keep(key, tmp_path / "a")
    restore(plan, moved(tmp_path / "a", tmp_path / "b"))
    assert_same(read_result(key, tmp_path / "b"), wanted)


def test_a_complete_run_without_a_line_gets_one(tmp_path: Path) -> None:
    """A study that was stopped just after a run's last record has not written its line."""
    (tmp_path / "plan.toml").write_text(PLAN)
    plan, out = load_plan(tmp_path / "plan.toml"), tmp_path / "a"
    for seed in (0, 1):
        write_run(out, key_of("sums", "ours", 1e-2, seed), [0.1, 0.2, 0.4])
    keep(key_of("sums", "ours", 1e-2, 0), out)
    half = key_of("sums", "ours", 1e-2, 10)
    write_run(out, half, [0.1, 0.2, 0.4], cut=True)
    assert keep_all(plan, out) == 1 and keep_all(plan, out) == 0
    assert restore(plan, moved(out, tmp_path / "b")) == 2
    assert read_result(half, out) is None


def test_a_run_keeps_its_settings_when_a_default_changes(tmp_path: Path) -> None:
    """And a setting that did not exist then gets its default."""
    from studies.toy_trainer import ToyConfig

    key = key_of("sums", "ours", 1e-2, 0)
    (tmp_path / "plan.toml").write_text(PLAN)
    write_run(tmp_path / "a", key, [0.1, 0.2, 0.4])
    asked_path = key.run_dir(tmp_path / "a") / ASKED_FILE
    asked = json.loads(asked_path.read_text())
    full = ToyConfig.model_validate(asked["config"]).model_dump(mode="json")
    full["algo"]["pool_decay"] = 0.5  # the default of that time
    del full["algo"]["keep"]
    asked_path.write_text(json.dumps({**asked, "config": full}))
    keep(key, tmp_path / "a")
    assert restore(load_plan(tmp_path / "plan.toml"), moved(tmp_path / "a", tmp_path / "b")) == 1
    config = json.loads((key.run_dir(tmp_path / "b") / ASKED_FILE).read_text())["config"]
    assert (config["algo"]["pool_decay"], config["algo"]["keep"]) == (0.5, 1.0)


def test_runs_from_another_start_are_not_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a start without its rows, as a repository has it, gets them again."""
    text = PLAN.replace("seeds = 2", "seeds = 1").replace("[1e-2, 1e-3]", "[1e-3]")
    (tmp_path / "plan.toml").write_text(text)
    start = prepare("sums", "middle", tmp_path / "out/start", steps=3)
    stamp = json.loads((start / "start.json").read_text()) | {"steps": STEPS}
    (start / "start.json").write_text(json.dumps(stamp))  # so that the command takes it for its own
    (start / "train.jsonl").unlink()
    command = ["study", "curves", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out")]
    assert main(command) == 0 and (start / "train.jsonl").stat().st_size > 10_000
    weights = start / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    start_digest.cache_clear()
    capsys.readouterr()
    assert main([*command, "--summary"]) == 0
    assert main(command) == 2
    assert "the finished runs of sums began with other weights" in capsys.readouterr().err


def test_damaged_files(tmp_path: Path) -> None:
    write_run(tmp_path / "a", key_of("sums", "ours", 1e-2, 0), [0.1, 0.2, 0.4])
    write_run(tmp_path / "a", key_of("sums", "ours", 1e-2, 1), [0.1, 0.2, 0.4], cut=True)
    (tmp_path / "plan.toml").write_text(PLAN)
    plan, path = load_plan(tmp_path / "plan.toml"), tmp_path / "b" / ROWS_FILE
    for seed in (0, 1):  # the second is incomplete, and has no line
        keep(key_of("sums", "ours", 1e-2, seed), tmp_path / "a")
    line = (tmp_path / "a" / ROWS_FILE).read_text()
    settings, run = line.splitlines(keepends=True)
    path.parent.mkdir()
    path.write_text(line + run[:40])  # the machine failed while it wrote the second run
    assert restore(plan, tmp_path / "b") == 1
    mend(tmp_path / "b")
    assert path.read_text() == line
    other = run.replace('"seed": 0', '"seed": 5')
    for damaged, named in (
        ("{}\n", "rows.jsonl:3"),
        ("nonsense\n", "rows.jsonl:3"),
        (other.replace('"made": "', '"made": "x'), "rows.jsonl:3"),
        (settings.replace('"config": {', '"config": {"colour": 1, ') + other, "colour"),
    ):
        path.write_text(line + damaged)
        with pytest.raises(UserError) as caught:
            restore(plan, tmp_path / "b")
        assert named in str(caught.value) and "\n" not in str(caught.value)
