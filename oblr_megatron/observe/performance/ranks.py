"""Time and memory of every rank in a step, gathered on rank 0 in one small collective.

Ranks wait for each other inside a phase, so their wall-clock times are nearly equal and do not reveal a slow rank.
These two values do:

    own seconds    of a phase. CPU: thread time, which excludes waiting in a collective or for an engine. GPU:
                   wall-clock time, because waiting kernels look busy.
    pace           CPU: own seconds of gradnorm, gradient and optimizer. GPU: seconds of a fixed matrix product that
                   each rank computes alone after the step (17 MB, 0.55 TFLOPs).

Rank 0 writes all values to RUN_DIR/logs/ranks.jsonl, one line per step with a list over ranks for each value, and logs
the extremes (docs/performance.md).
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from oblr_megatron.memory.training import resident_bytes
from oblr_megatron.metrics import RANKS_FILE, step_lines
from oblr_megatron.observe.performance.utilization import TRAINING
from oblr_megatron.timing import PHASES

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

PROBE_SIDE = 2048  # rows and columns of the fixed product's matrices
PROBE_REPEATS = 32


def memory_now() -> tuple[float, float, float]:
    """Memory of this process in bytes: allocated, reserved, and the largest allocated so far.

    GPU: that of tensors, and what the allocator holds for them. CPU: resident memory, for both.
    """
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
    resident = resident_bytes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB
    return resident, resident, max(peak, resident)


def row_of(
    wall_s: Mapping[str, float], own_s: Mapping[str, float], memory: tuple[float, float, float], pace_s: float
) -> Tensor:
    """One rank's values of a step for the gather, fp64 [2 * phases + 4].

    Args:
        wall_s: wall-clock seconds by phase; NaN is sent for a phase that was not entered.
        own_s: own seconds by phase, see the module.
        memory: as from `memory_now`.
        pace_s: see the module.
    """
    seconds = [times.get(phase, float("nan")) for times in (wall_s, own_s) for phase in PHASES]
    return torch.tensor([*seconds, *memory, pace_s], dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class RankTable:
    """Values of all ranks; each value is a list over ranks."""

    wall_s: dict[str, list[float]]
    own_s: dict[str, list[float]]
    memory: dict[str, list[float]]  # allocated, reserved, peak
    pace_s: list[float]

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> RankTable:
        """The table from all ranks' rows, in rank order; phases that no rank entered are left out."""
        table = torch.stack(list(rows))
        columns, entered = table.T.nan_to_num(0.0).tolist(), (~table.isnan().all(0)).tolist()
        count = len(PHASES)
        wall = {phase: columns[n] for n, phase in enumerate(PHASES) if entered[n]}
        own = {phase: columns[count + n] for n, phase in enumerate(PHASES) if entered[n]}
        allocated, reserved, peak, pace = columns[2 * count :]
        return cls(wall, own, {"allocated": allocated, "reserved": reserved, "peak": peak}, pace)

    def metrics(self) -> dict[str, float]:
        """The perf/ metrics of the table; for a single rank only its memory."""
        peaks = self.memory["peak"]
        metrics: dict[str, float] = {"perf/peak_memory_bytes": int(max(peaks))}
        if len(peaks) == 1:
            return metrics
        metrics["perf/peak_memory_rank"] = peaks.index(max(peaks))
        for phase, seconds in self.own_s.items():
            metrics |= {
                f"perf/ranks/{phase}/max_s": max(seconds),
                f"perf/ranks/{phase}/min_s": min(seconds),
                f"perf/ranks/{phase}/slowest": seconds.index(max(seconds)),
            }
        slowest, median = max(self.pace_s), statistics.median(self.pace_s)
        if median > 0:
            metrics["perf/slowest_rank"] = self.pace_s.index(slowest)
            metrics["perf/slowest_rank_ratio"] = slowest / median
        return metrics

    def line(self, step: int) -> str:
        """One line of ranks.jsonl; seconds with four digits, whole bytes."""
        table = {
            "step": step,
            "wall_s": {phase: _rounded(seconds) for phase, seconds in self.wall_s.items()},
            "own_s": {phase: _rounded(seconds) for phase, seconds in self.own_s.items()},
            "memory_bytes": {name: [int(value) for value in values] for name, values in self.memory.items()},
            "pace_s": _rounded(self.pace_s),
        }
        return json.dumps(table) + "\n"


def _rounded(seconds: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in seconds]


class RankLog:
    """Gathers every step's values and, on rank 0, writes RUN_DIR/logs/ranks.jsonl.

    Args:
        run_dir: of the run.
        group: CPU group of all ranks; its timeout bounds the gather.
        keep_until: last step to keep from an existing file when the first step is written; None: start a new file.
    """

    def __init__(self, run_dir: Path, group: ProcessGroup, keep_until: int | None = None) -> None:
        self._group, self._rank, self._size = group, dist.get_rank(group), dist.get_world_size(group)
        self._lines = step_lines(run_dir / RANKS_FILE, keep_until)

    def gather(self, step: int, timing: Mapping[str, float], own: Mapping[str, float]) -> dict[str, float]:
        """Gather a finished step; collective.

        Args:
            step: as logged, from 1.
            timing: "timing_s/<phase>" of this rank.
            own: this rank's own seconds by phase.

        Returns:
            The step's perf/ metrics on rank 0, {} elsewhere.
        """
        wall = {name.removeprefix("timing_s/"): seconds for name, seconds in timing.items()}
        row = row_of(wall, own, memory_now(), pace_s(own))
        rows = [torch.empty_like(row) for _ in range(self._size)] if self._rank == 0 else None
        dist.gather(row, rows, dst=0, group=self._group)
        if rows is None:
            return {}
        table = RankTable.of(rows)
        self._lines.write(table.line(step))
        return table.metrics()


def pace_s(own: Mapping[str, float]) -> float:
    """The pace (see the module) in seconds; on a CPU, 0 in a step without training."""
    if torch.cuda.is_available():
        return probe_s(torch.device("cuda", torch.cuda.current_device()))
    return sum(own.get(phase, 0.0) for phase in TRAINING)


def probe_s(device: torch.device) -> float:
    """Seconds for PROBE_REPEATS products of two bf16 matrices [PROBE_SIDE, PROBE_SIDE] on an idle device."""
    left = torch.ones(PROBE_SIDE, PROBE_SIDE, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(left)
    torch.mm(left, left, out=out)  # warm-up: loads the kernel
    _drain(device)
    start = time.perf_counter()
    for _ in range(PROBE_REPEATS):
        torch.mm(left, left, out=out)
    _drain(device)
    return time.perf_counter() - start


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
