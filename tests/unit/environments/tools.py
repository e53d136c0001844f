"""Tools of the tests. Imports no torch: the workers load this module."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path


def add(first: int, second: int = 1) -> int:
    """Add two numbers.

    Args:
        first: one of them
        second: the other
    """
    return first + second


def sleeps(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


def meets(place: str, own: str) -> str:
    """Wait for another call."""
    Path(place, own).touch()
    while len(list(Path(place).iterdir())) < 2:
        time.sleep(0.01)
    return "met"


async def patient(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


class Tools:
    @staticmethod
    def total(first: int, second: int) -> int:
        """Add two numbers.

        Args:
            first: one number.
            second: the other one.
        """
        return first + second


plus = add


def talks(count: int) -> str:
    """Say much."""
    return "x" * count


def untyped(first):
    """Nobody knows."""
    return first
