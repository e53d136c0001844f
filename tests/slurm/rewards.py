"""A reward that holds a run, so that a test can act on it between two known steps."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from tests.e2e.rewards import matching_characters

HOLD = "OBLR_TEST_HOLD"  # environment variable: a file in the job's directory, next to run/
HELD_AFTER = 2  # steps


def held(response: str, answer: str, prompt: str) -> float:
    """`matching_characters`. While the file of HOLD exists, the step after HELD_AFTER waits."""
    wait()
    return matching_characters(response, answer, prompt)


def held_match(response: str, answer: str, prompt: str) -> float:
    """The same, for prompts of any kind: 1 for the answer itself."""
    wait()
    return float(response == answer)


def wait() -> None:
    """Until the run has not come to the held step, or is no longer held."""
    hold = Path(os.environ[HOLD])
    while hold.exists() and last_step(hold.parent / "run") >= HELD_AFTER:
        time.sleep(0.1)


def last_step(run_dir: Path) -> int:
    """Last step in metrics.jsonl; 0 if there is none."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    return int(json.loads(whole[-1])["step"]) if whole else 0
