"""Prompts that come again and again without success are listed, also after a resume. Not covered: a whole run."""

from __future__ import annotations

from pathlib import Path

import torch

from oblr_megatron.metrics import MetricsWriter
from oblr_megatron.observe.prompt_log import VISITS, PromptLog, never_solved
from oblr_megatron.observe.report.page import write_report
from oblr_megatron.types import Prompt

PROMPTS = [Prompt(n, f"row<{n}>", "", (1,), "", "sums") for n in range(3)]


def scored(*rewards: list[float]) -> torch.Tensor:
    return torch.tensor(rewards, dtype=torch.float64)


def run_of(run_dir: Path, steps: int = VISITS) -> PromptLog:
    """Row 0 is never solved, row 1 once, row 2 always; 0.1 is for the format alone."""
    log = PromptLog(run_dir)
    for step in range(1, steps + 1):
        log.write(step, [(PROMPTS, scored([0.1, 0.0], [0.0, 1.0 if step == 2 else 0.0], [1.1, 0.1]))])
    return log


def test_a_prompt_that_is_never_solved_is_named_with_its_visits(tmp_path: Path) -> None:
    log = run_of(tmp_path, VISITS - 1)
    assert never_solved(tmp_path, 99) == {}, "too few visits"
    log.write(VISITS, [(PROMPTS[:2], scored([0.0, 0.0], [0.1, 0.0]))])
    assert never_solved(tmp_path, 99) == {"sums/row<0>": VISITS}
    log.write(VISITS + 1, [(PROMPTS[:1], scored([1.0, 0.0]))])
    assert never_solved(tmp_path, VISITS) == {"sums/row<0>": VISITS}
    assert never_solved(tmp_path, VISITS + 1) == {}, "solved at last"


def test_equal_rewards_tell_nothing(tmp_path: Path) -> None:
    log = PromptLog(tmp_path)
    assert never_solved(tmp_path, 99) == {}, "no file"
    for step in range(9):
        log.write(step, [(PROMPTS, scored([0.0], [0.0], [0.0]))])
    assert never_solved(tmp_path, 99) == {}


def test_a_response_that_could_not_be_scored_is_no_failure(tmp_path: Path) -> None:
    """Between rewards of -1 and 1 a 0 in its place would look like a success."""
    log, nan = PromptLog(tmp_path), float("nan")
    for step in range(VISITS):
        log.write(step, [(PROMPTS, scored([nan, nan], [-1.0, nan], [1.0, nan]))])
    assert never_solved(tmp_path, 99) == {"sums/row<1>": VISITS}
    log.write(VISITS, [(PROMPTS, scored([nan, nan], [nan, nan], [nan, nan]))])


def test_a_prompt_that_comes_twice_in_a_step_is_solved_by_either(tmp_path: Path) -> None:
    log = PromptLog(tmp_path)
    for step in range(VISITS):
        log.write(step, [([PROMPTS[0], PROMPTS[1], PROMPTS[0]], scored([1.0], [0.0], [0.0]))])
    assert never_solved(tmp_path, 99) == {"sums/row<1>": VISITS}


def test_a_resumed_run_counts_its_steps_once(tmp_path: Path) -> None:
    run_of(tmp_path, VISITS)
    log = PromptLog(tmp_path, keep_until=1)
    log.write(2, [(PROMPTS, scored([0.0], [1.0], [1.0]))])
    assert never_solved(tmp_path, 99) == {}
    for step in (3, 4):
        log.write(step, [(PROMPTS, scored([0.0], [1.0], [1.0]))])
    assert never_solved(tmp_path, 99) == {"sums/row<0>": 4}


def test_the_report_lists_them(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(VISITS, {"reward/mean": 0.5})
    assert "Prompts never solved" not in write_report(tmp_path).read_text()
    run_of(tmp_path)
    page = write_report(tmp_path).read_text()
    assert "Prompts never solved" in page and f"<th>sums/row&lt;0&gt;</th><td>{VISITS}</td>" in page
    assert "row&lt;1&gt;" not in page
