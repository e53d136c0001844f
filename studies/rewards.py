"""Reward functions of the tasks, for `reward.name`. Example: reward.name = "studies.rewards:sums"."""

from __future__ import annotations

from collections.abc import Callable

from studies.tasks import TASKS


def __getattr__(name: str) -> Callable[[str, str, str], float]:
    """The reward function of the task of this name."""
    if name not in TASKS:
        raise AttributeError(name)

    def reward(response: str, answer: str, prompt: str) -> float:
        return TASKS[name].reward(response, answer)

    return reward
