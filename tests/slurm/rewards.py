"""A slow reward, so that a run lasts long enough to be stopped."""

from __future__ import annotations

import time

SECONDS = 0.04


def slow_match(response: str, answer: str, prompt: str) -> float:
    time.sleep(SECONDS)
    return float(response == answer)
