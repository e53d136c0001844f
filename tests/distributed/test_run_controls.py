"""Whole runs on saved samples: every estimator of the signal, the panel, alarms.

Not covered: the formulas (tests/unit/algo), the "momentum" estimator's state (test_momentum.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oblr_megatron.algo.panel import PANEL
from oblr_megatron.config.baselines import BASELINES
from tests.distributed.replayed import PROMPTS, STEPS, certain, config_of, make_inputs, train

MOVING = ("algo.snr.max_change=1.5", "algo.snr.horizon=3", "algo.snr.floor=0.01")  # a rate that changes in few steps


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def source(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("source") / "run"
    train(config_of(inputs, run_dir, *MOVING))
    return run_dir


def test_weights_that_are_not_finite_are_not_saved(inputs: Path, tmp_path: Path) -> None:
    """Adam divides 0 by 0 where a gradient is 0. The gradient is finite, so that nothing refuses it."""
    said = train(config_of(inputs, tmp_path / "run", "optimizer.adam_eps=1e-320", "checkpoint.every_steps=1"), status=1)
    assert "weights are not finite after an update" in said.splitlines()[-1]
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*")) and not (tmp_path / "run" / "hf").exists()


@pytest.mark.parametrize("estimator", ["prompts", "momentum", "samples", "plugin"])
def test_every_estimator_drives_the_schedule(inputs: Path, source: Path, tmp_path: Path, estimator: str) -> None:
    """Each estimator gives its own signal on the same samples; noise is the rest of the squared gradient."""
    run_dir = tmp_path / "run"
    train(config_of(inputs, run_dir, f"algo.snr.estimator={estimator}", *MOVING))
    found, folds = certain(run_dir), certain(source)
    # Before the rates part, both have seen the same gradient.
    first = 1 if estimator == "momentum" else 0
    assert "snr/signal_sq" not in found[0] if first else "snr/signal_sq" in found[0]
    for record in found[first:]:
        signal, noise, sq_norm = record["snr/signal_sq"], record["snr/noise_trace"], record["grad_norm"] ** 2
        if estimator == "plugin":
            assert signal == pytest.approx(sq_norm)
        else:
            assert signal + noise / PROMPTS == pytest.approx(sq_norm)
    assert found[0]["grad_norm"] == pytest.approx(folds[0]["grad_norm"], rel=1e-5)
    assert [record["lr"] for record in found] != [record["lr"] for record in folds]


def test_the_panel_is_logged_and_shown(inputs: Path, source: Path, tmp_path: Path) -> None:
    """With norms that the baseline needs, or that only gradnorm.always asks for; without norms there is no panel."""
    rloo, measured = tmp_path / "rloo", tmp_path / "measured"
    train(config_of(inputs, rloo, "algo.baseline=rloo"))
    train(config_of(inputs, measured, "algo.baseline=rloo", "gradnorm.always=true"))
    shown = {name for name in PANEL if not BASELINES[name].pool and BASELINES[name].zero_on_equal}
    for run_dir, names in ((source, shown), (rloo, set()), (measured, shown)):
        logged = {name.split("/")[1] for name in certain(run_dir)[-1] if name.endswith("/variance_ratio")}
        assert logged == names
        assert certain(run_dir)[-1]["baseline/self_dependence"] == pytest.approx(0.0, abs=1e-12)
    assert "Variance under every baseline" in (source / "report.html").read_text()


def test_an_alarm_is_said_once_over_a_break(inputs: Path, tmp_path: Path) -> None:
    """A baseline that includes the response itself: G = 4, so a quarter of it is the response's own reward.

    In the fifth step, after the break, a second alarm: the saved log-probs are made up and differ from the trainer's.
    """
    run_dir = tmp_path / "run"
    said = train(config_of(inputs, run_dir, "algo.baseline=group_mean", "num_steps=4"), 2)
    assert said.count("alarm at step 1: A response's baseline moves by 0.25") == 1
    (alarm,) = map(json.loads, (run_dir / "alarms.jsonl").read_text().splitlines())
    assert (alarm["name"], alarm["step"]) == ("self_dependence", 1)
    said = train(config_of(inputs, run_dir, "algo.baseline=group_mean", "checkpoint.resume=newest"))
    assert "moves by" not in said and said.count("alarm at step 5: Trainer and vLLM differ by ") == 1
    kept = [json.loads(line)["name"] for line in (run_dir / "alarms.jsonl").read_text().splitlines()]
    assert kept == ["self_dependence", "mismatch"] and len(certain(run_dir)) == STEPS
    assert "moves by 0.25" in (run_dir / "report.html").read_text()
