"""Modes of one cell measured against each other: in turn, in one process, round after round."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meter import Meter
from shapes import Cell
from steps import GHOST, PLAIN, PLAIN_TORCH, Candidate

MIN_ROUNDS = 3
BASE = {GHOST: PLAIN_TORCH, PLAIN_TORCH: PLAIN_TORCH}  # whose plain step a mode's memory and work are over; else PLAIN


@dataclass(frozen=True, slots=True)
class Row:
    """One mode on one cell.

    Example: Row(mode="stash", detail="", shape="qwen3-0.6b", layers=2, parameters=35655936, tokens=512, samples=4,
                 steps=10, seconds=6.9, ratio_to_plain=1.18, norm_seconds=1.05, extra_bytes=570490000)
    """

    mode: str
    detail: str  # what the mode chose
    shape: str
    layers: int
    parameters: int
    tokens: int
    samples: int
    steps: int  # rounds that were measured
    seconds: float  # of a step, median
    ratio_to_plain: float  # median of the ratios of each round
    norm_seconds: float  # over the plain step that the mode is built on
    extra_bytes: int  # of peak memory, over the same


def measure(cell: Cell, candidates: Sequence[Candidate], meter: Meter, rounds: int, seconds: float) -> list[Row]:
    """One row a mode.

    Args:
        cell: what the candidates were built for.
        candidates: the plain step among them, and the base of every mode; of several of one mode the fastest is taken.
        meter: the clock.
        rounds: to measure, each candidate once a round, in turn forwards and backwards.
        seconds: no round after the first `MIN_ROUNDS` is begun later than this.
    """
    end = time.monotonic() + seconds
    for candidate in candidates:
        if candidate.mode in (PLAIN, PLAIN_TORCH):
            meter.peak(candidate.make)  # what is held from here on: weights, gradients, moments
    chosen, peaks = fastest(candidates, meter)
    steps = {mode: candidate.make() for mode, candidate in chosen.items()}
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    for number in range(rounds):
        if number >= MIN_ROUNDS and time.monotonic() > end:
            break
        for mode in list(steps)[:: -1 if number % 2 else 1]:
            times[mode].append(meter.seconds(steps[mode]))
    ratios = {mode: paired_ratio(taken, times[PLAIN]) for mode, taken in times.items()}
    plain = statistics.median(times[PLAIN])
    return [
        Row(
            mode=mode,
            detail=candidate.detail,
            shape=cell.shape,
            layers=cell.layers,
            parameters=cell.parameters,
            tokens=cell.tokens,
            samples=cell.samples,
            steps=len(times[mode]),
            seconds=statistics.median(times[mode]),
            ratio_to_plain=ratios[mode],
            norm_seconds=plain * (ratios[mode] - ratios[BASE.get(mode, PLAIN)]),
            extra_bytes=peaks[mode] - peaks[BASE.get(mode, PLAIN)],
        )
        for mode, candidate in chosen.items()
    ]


def fastest(candidates: Sequence[Candidate], meter: Meter) -> tuple[dict[str, Candidate], dict[str, int]]:
    """By mode the candidate, of several the fastest, and the peak of memory in its first step.

    Each is made for this and let go again, so that no peak has in it what another mode keeps.
    """
    rivals = Counter(candidate.mode for candidate in candidates)
    chosen: dict[str, tuple[float, Candidate, int]] = {}
    for candidate in candidates:
        peak = meter.peak(candidate.make)
        taken = meter.seconds(candidate.make()) if rivals[candidate.mode] > 1 else 0.0
        if candidate.mode not in chosen or taken < chosen[candidate.mode][0]:
            chosen[candidate.mode] = taken, candidate, peak
    return (
        {mode: candidate for mode, (_, candidate, _) in chosen.items()},
        {mode: peak for mode, (_, _, peak) in chosen.items()},
    )


def paired_ratio(times: Sequence[float], plain: Sequence[float]) -> float:
    """The median over rounds of one mode's time to the plain step's."""
    return statistics.median(taken / base for taken, base in zip(times, plain, strict=True))
