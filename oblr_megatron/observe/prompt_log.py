"""The best reward of every prompt in every step, RUN_DIR/logs/prompts.jsonl, and the prompts that were never solved.

A line is {"step": 12, "lowest": 0.0, "best": {"gsm8k/41": 0.0, ...}}: the lowest value of the main reward in the step,
and the best of each prompt by "source/id", also of those that dynamic sampling left out. Wrong answers in the data stay
unsolved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oblr_megatron.metrics import intact_lines, step_lines

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.types import Prompt

PROMPTS_FILE = "logs/prompts.jsonl"
VISITS = 4  # fewer tell nothing about a prompt


class PromptLog:
    """Writes the file.

    Args:
        run_dir: of the run.
        keep_until: last step to keep from an existing file; None: start a new file.
    """

    def __init__(self, run_dir: Path, keep_until: int | None = None) -> None:
        self._lines = step_lines(run_dir / PROMPTS_FILE, keep_until)

    def write(self, step: int, visits: Iterable[tuple[Sequence[Prompt], Tensor]]) -> None:
        """Add a step: all prompts that were sampled, in parts, and the values [n, G] of their main reward.

        NaN: the response has none; a prompt without any is left out. Not the sum of rewards: next to a penalty a
        response without it looks like a success.
        """
        best, lowest = dict[str, float](), math.inf
        for prompts, rewards in visits:
            for prompt, values in zip(prompts, rewards.tolist(), strict=True):
                known = [value for value in values if not math.isnan(value)]
                if not known:
                    continue
                lowest, reward = min(lowest, *known), max(known)
                name = f"{prompt.source}/{prompt.id}"  # a prompt may come twice in a step
                best[name] = max(reward, best.get(name, reward))
        if best:
            self._lines.write(json.dumps({"step": step, "lowest": lowest, "best": best}) + "\n")


def never_solved(run_dir: Path, last_step: int) -> dict[str, int]:
    """Visits of the prompts that came VISITS times or more without success, most visits first.

    A success is a reward of at least the middle between the lowest and the highest of the run.
    """
    lowest = math.inf
    visits: dict[str, int] = {}
    best: dict[str, float] = {}
    for _, line in intact_lines(run_dir / PROMPTS_FILE):
        if line["step"] <= last_step:
            lowest = min(lowest, line["lowest"])
            for name, reward in line["best"].items():
                visits[name] = visits.get(name, 0) + 1
                best[name] = max(reward, best.get(name, reward))
    middle = (lowest + max(best.values(), default=lowest)) / 2
    unsolved = [name for name, count in visits.items() if count >= VISITS and best[name] < middle]
    return {name: visits[name] for name in sorted(unsolved, key=lambda name: (-visits[name], name))}
