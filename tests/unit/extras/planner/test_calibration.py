"""The fit recovers the constants behind generated steps, and reads measured phases from a run's files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.cli import main
from oblr_megatron.errors import UserError
from oblr_megatron.extras.planner.calibration import (
    Observation,
    calibrate,
    cores_named,
    fit,
    measured_phases,
    observation_of,
    predicted_phases,
)
from oblr_megatron.extras.planner.constants import CPU, DEFAULT, cpu_machine, read_constants
from oblr_megatron.extras.planner.setting import Setting
from studies.scaling_cases import CASES
from tests.tiny import make_hf_dir

NAMES = ("product", "message_s", "layer_s")


def observations(constants: Any) -> list[Observation]:
    """The dense cases of the study, with the seconds that these constants predict."""
    found = []
    for case in CASES[:3] + CASES[8:13]:
        asked = Setting(case.hf_config(), case.config(), case.ranks, cpu_machine(2))
        empty = Observation(case.name, asked, {"gradient": 1.0, "optimizer": 1.0})
        found.append(replace(empty, seconds=predicted_phases(empty, constants)))
    return found


def test_constants_are_recovered() -> None:
    true = replace(CPU, product=0.3, message_s=2e-3, layer_s=4e-3)
    found = fit(observations(true), CPU, NAMES)
    assert found.rms < 0.03
    for name in NAMES:
        # the ridge pulls it slightly towards its start
        assert getattr(found.constants, name) == pytest.approx(getattr(true, name), rel=0.15), name
    assert found.constants.memory == CPU.memory  # not fitted
    assert len(found.rows) == 16 and "residual" in found.table()


def test_constants_that_the_runs_do_not_determine_stay() -> None:
    """A single rank sends nothing, so the latency of a message keeps its value."""
    found = fit(observations(replace(CPU, product=0.5))[:2], CPU, NAMES)
    assert found.constants.message_s == pytest.approx(CPU.message_s, rel=0.01)


def test_nothing_to_fit_to() -> None:
    with pytest.raises(UserError, match="no measured phases"):
        fit([], CPU, NAMES)


REPLAYED = {"replay": "saved"}


def make_run(directory: Path, gradient: float, rollout: Mapping[str, Any] = REPLAYED) -> Path:
    """The files of a run of three steps."""
    directory.mkdir()
    make_hf_dir(directory / "model")
    config = {
        "run_dir": str(directory),
        "num_prompts": 4,
        "group_size": 4,
        "model": {"path": str(directory / "model")},
        "data": {"train": "none", "max_prompt_tokens": 16},
        "rollout": {**rollout, "max_response_tokens": 64},
        "gradnorm": {"mode": "two_pass"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    environment = {"world_size": 1, "device": "CPU (x86_64, 2 cores)", "versions": {}}
    (directory / "environment.json").write_text(json.dumps(environment))
    steps = [
        {"step": n, "timing_s/gradnorm": 0.1, "timing_s/gradient": seconds, "timing_s/optimizer": 0.01}
        | {"timing_s/rollout": 0.001, "timing_s/push": 0.001, "response_length/mean": 32.0}
        for n, seconds in ((1, 99.0), (2, gradient), (3, gradient))
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return directory


def test_a_run_is_read_without_its_first_step(tmp_path: Path) -> None:
    found = observation_of(make_run(tmp_path / "run", 0.4), "h100")
    assert found.seconds == pytest.approx({"gradient": 0.5, "optimizer": 0.01})
    assert found.setting.mean_response_tokens == 32 and found.setting.machine.cores == 2
    assert found.setting.hf_config["hidden_size"] == 48


def test_sampling_phases_count_unless_replayed() -> None:
    steps = [{"timing_s/gradient": 1.0, "timing_s/optimizer": 0.1, "timing_s/rollout": 3.0, "timing_s/push": 0.2}]
    assert measured_phases(steps, sampled=True) == {"gradient": 1.0, "optimizer": 0.1, "rollout": 3.0, "push": 0.2}
    assert "rollout" not in measured_phases(steps, sampled=False)


@pytest.mark.parametrize(
    "rollout",
    [
        {"overlap": "stream", "sleep_level": 0},
        {"overlap": "one_step", "max_staleness": 1, "sleep_level": 0},
        {"servers": ["http://127.0.0.1:8000"]},
        REPLAYED,
        {},
    ],
    ids=["stream", "one_step", "servers", "replay", "engines"],
)
def test_sampling_is_fitted_to_engines_that_the_trainer_waits_for(tmp_path: Path, rollout: dict[str, Any]) -> None:
    said = calibrate([make_run(tmp_path / "run", 0.4, rollout)], "h100", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert ("rollout" in [row["phase"] for row in rows]) == (not rollout)
    assert said.startswith("run: without rollout and push") == bool(rollout)


def test_calibrate_writes_what_plan_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(make_run(tmp_path / name, seconds)) for name, seconds in (("a", 0.4), ("b", 0.5))]
    out = tmp_path / "constants.json"
    assert main(["plan", "--calibrate", *runs, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "residual" in said and str(out) in said
    constants = read_constants(out)
    found = observation_of(tmp_path / "a", "h100")
    assert sum(predicted_phases(found, constants).values()) == pytest.approx(0.56, rel=0.3)
    assert constants.decode == CPU.decode


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        calibrate([tmp_path / "nothing"], "h100", tmp_path / "out.json")
    assert caught.value.where == str(tmp_path / "nothing")
    (tmp_path / "wrong.json").write_text('{"constants": {"speed": 1}}')
    with pytest.raises(UserError, match="'speed'"):
        read_constants(tmp_path / "wrong.json")
    assert main(["plan", "--calibrate", str(tmp_path)]) == 2  # no --out
    layout = ["--write", str(tmp_path / "layout.toml")]
    assert main(["plan", "--calibrate", str(tmp_path), "--out", str(tmp_path / "new.json"), *layout]) == 2
    assert main(["plan", "--model", "Qwen3-8B", "--gpus", "8", "--out", str(tmp_path / "plan.json")]) == 2


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (
            [{"constants": {"product": value}} for value in (0, -0.5, math.nan, math.inf, True, "0.5", None, [0.5])],
            r"'product' is not a constant with a number above 0 \[.*wrong\.json",
        ),
        ([[1], {"constants": [1]}, {"constants": None}, {}], "not a file of constants"),
    ],
)
def test_constants_are_numbers_above_0(tmp_path: Path, contents: list[object], said: str) -> None:
    for content in contents:
        (tmp_path / "wrong.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=said):
            read_constants(tmp_path / "wrong.json")


def test_files_may_leave_constants_out(tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text('{"constants": {"product": 0.5}}')
    assert read_constants(tmp_path / "some.json") == replace(DEFAULT, product=0.5)


def test_cores_from_the_device_description() -> None:
    assert cores_named("CPU (x86_64, 2 cores)") == 2 and cores_named("CPU") is None
