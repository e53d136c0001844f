"""User reward functions that are async or take many responses, correct and faulty."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.unit.processes.scorers import mixed

BEGUN: list[str] = []  # in a worker: responses with a started call


async def overlap(response: str, answer: str, prompt: str) -> float:
    """The number of calls that had begun when this one ended."""
    BEGUN.append(response)
    await asyncio.sleep(0)
    return float(len(BEGUN))


async def slow(response: str, answer: str, prompt: str) -> object:
    """Fail in the way named by the response."""
    if response == "late":
        await asyncio.sleep(60)
    if response == "stubborn":
        await refuses_to_stop()
    if response == "cancels":
        raise asyncio.CancelledError
    if response == "stray exit":
        await asyncio.create_task(exits())
    return mixed(response, answer, prompt)


async def process(response: str, answer: str, prompt: str) -> float:
    """The worker's process id."""
    if response == "late":
        await asyncio.sleep(60)
    return float(os.getpid())


async def exits() -> None:
    sys.exit(3)


async def refuses_to_stop() -> None:
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


class Scorer:
    """An object with an async __call__."""

    async def __call__(self, response: str, answer: str, prompt: str) -> float:
        await asyncio.sleep(0)
        return 0.5


an_object = Scorer()


def returns_a_coroutine(response: str, answer: str, prompt: str) -> object:
    return slow(response, answer, prompt)


def returns_a_coroutine_of_many(responses: Sequence[str], answers: Sequence[str], prompts: Sequence[str]) -> object:
    return together(responses, answers, prompts)


async def async_generator(response: str, answer: str, prompt: str) -> object:  # type: ignore[misc]
    yield 1.0


def sizes(responses: Sequence[str], answers: Sequence[str], prompts: Sequence[str]) -> list[float]:
    """The number of responses in the call."""
    assert len(responses) == len(answers) == len(prompts)
    return [float(len(responses))] * len(responses)


def best_of(responses: Sequence[str], answers: Sequence[str], prompts: Sequence[str]) -> list[float]:
    """1 for the longest response to each prompt; needs whole groups."""
    longest = dict.fromkeys(prompts, 0)
    for response, prompt in zip(responses, prompts, strict=True):
        longest[prompt] = max(longest[prompt], len(response))
    return [float(len(response) == longest[prompt]) for response, prompt in zip(responses, prompts, strict=True)]


def many(responses: Sequence[str], answers: Sequence[str], prompts: Sequence[str]) -> object:
    """Fail in the way named by the first response."""
    fine = [1.0] * len(responses)
    named = {
        "short": fine[1:],
        "long": [*fine, 1.0],
        "number": 3.0,
        "string": "1" * len(responses),
        "table": dict.fromkeys(range(len(responses)), 1.0),
        "nothing": None,
        "numpy": np.ones(len(responses), dtype=np.float32),
        "tuple": tuple(fine),
        "generator": (value for value in fine),
        "holes": [None, float("nan"), "five", 10**400, *fine[4:]],
        "bad text": BadText(),
    }
    return named[responses[0]] if responses[0] in named else [mixed(response, "", "") for response in responses]


class BadText:
    """Has no repr."""

    def __repr__(self) -> str:
        raise RuntimeError("no text of this")


async def together(responses: Sequence[str], answers: Sequence[str], prompts: Sequence[str]) -> object:
    if responses[0] == "late":
        await asyncio.sleep(60)
    if responses[0] == "block":
        time.sleep(60)
    if responses[0] == "die":
        os._exit(1)
    await asyncio.sleep(0)
    return many(responses, answers, prompts)


def by_level(response: str, answer: str, prompt: str, row: dict[str, Any]) -> float:
    """Uses the row's other columns."""
    assert row["answer"] == answer
    row["answer"] = "changed"  # a row of its own for every call
    return float(row["level"])


async def by_level_async(response: str, answer: str, prompt: str, row: dict[str, Any]) -> float:
    return by_level(response, answer, prompt, row)


def by_levels(
    responses: Sequence[str], answers: Sequence[str], prompts: Sequence[str], rows: Sequence[dict[str, Any]]
) -> list[float]:
    return list(map(by_level, responses, answers, prompts, rows))


def with_an_option(response: str, answer: str, prompt: str, scale: float = 2.0) -> float:
    """The fourth parameter is not the row."""
    return scale
