"""Measure the modes of one cell against each other: in turn, in one process, over several rounds."""

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
BASE = {GHOST: PLAIN_TORCH, PLAIN_TORCH: PLAIN_TORCH}  # mode -> the plain step it is compared with; default PLAIN


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one mode on one cell.

    Example: Row(mode="stash", detail="", shape="qwen3-0.6b", layers=2, parameters=35655936, tokens=512, samples=4,
                 dtype="float32", steps=10, seconds=6.9, ratio_to_plain=1.18, norm_seconds=1.05, extra_bytes=570490000)
    """

    mode: str
    detail: str  # the variant that the mode chose
    shape: str
    layers: int
    parameters: int
    tokens: int
    samples: int
    dtype: str
    steps: int  # measured rounds
    seconds: float  # per step, median
    ratio_to_plain: float  # median over rounds
    norm_seconds: float  # time over the mode's base (see BASE)
    extra_bytes: int  # peak memory over the mode's base


def measure(cell: Cell, candidates: Sequence[Candidate], meter: Meter, rounds: int, seconds: float) -> list[Row]:
    """Measure; returns one row per mode.

    Args:
        cell: the cell that the candidates were built for.
        candidates: must include PLAIN and the base of every mode. Of several candidates of a mode the fastest counts.
        meter: measures time and memory.
        rounds: number of rounds; each runs every mode once, in alternating order.
        seconds: after `MIN_ROUNDS`, no round starts later than this.
    """
    end = time.monotonic() + seconds
    for candidate in candidates:
        if candidate.mode in (PLAIN, PLAIN_TORCH):
            meter.peak(candidate.make)  # allocates weights, gradients and moments
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
            dtype=cell.dtype,
            steps=len(times[mode]),
            seconds=statistics.median(times[mode]),
            ratio_to_plain=ratios[mode],
            norm_seconds=plain * (ratios[mode] - ratios[BASE.get(mode, PLAIN)]),
            extra_bytes=peaks[mode] - peaks[BASE.get(mode, PLAIN)],
        )
        for mode, candidate in chosen.items()
    ]


def fastest(candidates: Sequence[Candidate], meter: Meter) -> tuple[dict[str, Candidate], dict[str, int]]:
    """({mode: fastest candidate}, {mode: peak memory of its first step}).

    Each candidate is freed after its measurement, so that no peak includes another mode's memory.
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
    """Median over rounds of (time / plain time) in one round."""
    return statistics.median(taken / base for taken, base in zip(times, plain, strict=True))
