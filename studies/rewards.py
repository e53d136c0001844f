"""The tasks' rewards as functions that `reward.name` can name: "studies.rewards:sums"."""

from __future__ import annotations

from collections.abc import Callable

from studies.tasks import TASKS


def __getattr__(name: str) -> Callable[[str, str, str], float]:
    """The reward of the task of this name."""
    if name not in TASKS:
        raise AttributeError(name)

    def score_batch(response: str, answer: str, prompt: str) -> float:
        return TASKS[name].reward(response, answer)

    return score_batch
