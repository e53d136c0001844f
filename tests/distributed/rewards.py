"""Reward functions of runs in these tests. Reward workers import this module, so it imports nothing."""

from __future__ import annotations


def greatest(responses: list[str], answers: list[str], prompts: list[str]) -> list[float]:
    """1 for the greatest response to each prompt, 0 for the others; each prompt has its own answer."""
    best = {gold: max(r for r, a in zip(responses, answers, strict=True) if a == gold) for gold in answers}
    return [float(one == best[gold]) for one, gold in zip(responses, answers, strict=True)]
