"""The responses that the console shows. Not covered: the metrics of a step (tests/unit/test_run.py)."""

from __future__ import annotations

import pytest
import torch

from oblr_megatron.observe.step_metrics import MAX_SHOWN, StepRecord, quoted, sample_lines
from oblr_megatron.types import Prompt, Sample, Scored

REWARDS = torch.tensor([[0.25, 1.0], [0.0, 0.5], [1.0, 0.75]], dtype=torch.float64)


def record_of(text: str = "") -> StepRecord:
    """Three prompts with two responses each; response n is the text "nN"."""
    prompts = [Prompt(q, f"p{q}", f"{q}+{q}=", (q,), str(2 * q), "test") for q in range(3)]
    samples = [
        Sample(n // 2, (n // 2,), (1,), (0.0,), text or f"n{n}", "length" if n == 2 else "stop", 0) for n in range(6)
    ]
    scored = Scored(REWARDS, torch.ones(3, 2, dtype=torch.int64), failures=0)
    return StepRecord(done=1, prompts=prompts, samples=samples, scored=scored)


@pytest.mark.parametrize(("count", "shown"), [(0, ""), (1, "1"), (2, "12"), (3, "152"), (6, "145302"), (100, "145302")])
def test_the_shown_samples_go_from_the_best_to_the_worst(count: int, shown: str) -> None:
    lines = sample_lines(record_of(), count)
    assert [line.partition("response 'n")[2][:1] for line in lines] == list(shown)


def test_a_line_has_prompt_answer_response_and_reward() -> None:
    best, worst = sample_lines(record_of(), 2)
    assert all(part in best for part in ("1.00", "'0+0='", "'0'", "'n1'"))
    assert all(part in worst for part in ("0.00", "'1+1='", "'2'", "'n2'")) and worst != best
    assert "limit" in worst and "limit" not in best, "the response was cut"


def test_a_text_stays_on_its_line_and_does_not_control_the_terminal() -> None:
    (line,) = sample_lines(record_of("\x1b[2J\n" * 1000), 1)
    assert "\n" not in line and "\x1b" not in line and len(line) < 6 * MAX_SHOWN
    assert quoted("a" * 500 + "z") == repr("a" * (MAX_SHOWN // 2) + " ... " + "a" * (MAX_SHOWN // 2 - 1) + "z")
    assert quoted("a" * MAX_SHOWN) == repr("a" * MAX_SHOWN)


def test_a_record_without_samples_shows_none() -> None:
    assert sample_lines(StepRecord(done=0), 3) == []
