"""Find the moments at which to kill a run, from outside: from its metrics file and its checkpoint directory."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from soak_watch import Family, command_of

from oblr_megatron.checkpoint.store import CHECKPOINTS, MANIFEST, checkpoints_of

START, STEP, WRITE, COMMIT, PRUNE = MOMENTS = ("start", "step", "write", "commit", "prune")
"""Before the first step; in a step while nothing is written; a checkpoint is partly written; a checkpoint is complete
but not yet renamed, or just renamed; an older checkpoint is partly removed."""
POLL_S = 0.0001
LOOK_S = 0.5  # between two scans of the processes: a scan takes longer than writing a tiny checkpoint
RANK = "oblr_megatron.step_loop"


@dataclass(slots=True)
class Usual:
    """Durations in the unbroken run, seconds. Random delays are drawn up to these."""

    start: float  # from process start to the end of the first step
    step: float
    write: float  # from creating a checkpoint's directory to renaming it


@dataclass(slots=True)
class Attempt:
    """One start of a run."""

    job: subprocess.Popen[bytes]
    run_dir: Path
    limit_s: float  # time limit of every wait
    family: Family = field(init=False)

    def __post_init__(self) -> None:
        self.family = Family(psutil.Process(self.job.pid))

    def kill(self, moment: str, usual: Usual, draw: random.Random) -> str | None:
        """Wait for the moment plus a random delay within it, then kill launcher and ranks with SIGKILL.

        Returns:
            The actual moment, from what is on disk; None if the run had ended.
        """
        logged = self.steps()
        if moment == START:
            self.wait(lambda: False, draw.uniform(0.0, usual.start))
        else:
            further = logged + draw.randint(0, 2)
            self.wait(lambda: self.steps() > further)
        self.family.look()
        victims = [process for process in self.family.seen.values() if RANK in command_of(process)] + [self.family.root]
        if moment != START:
            self._await(moment, usual, draw)
        if self.job.poll() is not None:
            return None
        for process in victims:
            process.kill()
        self.job.wait()
        return self._interrupted(logged)

    def measure(self) -> Usual:
        """Follow an unbroken run to its end and measure its durations."""
        begin, first, begun = time.monotonic(), 0.0, 0.0
        self.family.look()
        took: list[float] = []
        seen: set[str] = set()
        while self.job.poll() is None and time.monotonic() - begin < self.limit_s:
            now, partials = time.monotonic(), self.partials()
            if partials and not seen:
                begun = now
            if seen and not partials:
                took.append(now - begun)
            seen = partials
            first = first or (now - begin if self.steps() else 0.0)
            time.sleep(POLL_S)
        if self.job.poll() is None:
            self.family.look()  # the ranks of a run that hangs, for `left_over`
        steps = max(1, self.steps() - 1)
        step = (time.monotonic() - begin - first) / steps
        return Usual(start=first, step=step, write=statistics.median(took) if took else step)

    def wait_for_end(self) -> None:
        """Wait until the run has ended."""
        self.wait(lambda: False)

    def wait(self, condition: Callable[[], Any], seconds: float | None = None, *, look: bool = True) -> None:
        """Wait until the condition holds, the run ends or time is up; with `look`, record the run's processes."""
        end = time.monotonic() + (self.limit_s if seconds is None else seconds)
        looked = 0.0
        while not condition() and self.job.poll() is None and time.monotonic() < end:
            if look and time.monotonic() - looked > LOOK_S:
                self.family.look()
                looked = time.monotonic()
            time.sleep(POLL_S)

    def steps(self) -> int:
        """Number of lines in the metrics file."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def partials(self) -> set[str]:
        """Names of uncommitted checkpoints."""
        return {path.name for path in (self.run_dir / CHECKPOINTS).glob(".*.partial")}

    def retired(self) -> bool:
        """Whether an older checkpoint is being removed."""
        names = os.listdir(self.run_dir / CHECKPOINTS) if (self.run_dir / CHECKPOINTS).is_dir() else []
        newest = max((name for name in names if not name.startswith(".")), default="")
        return any(name.startswith(".") and name[1:] < newest for name in names)

    def _await(self, moment: str, usual: Usual, draw: random.Random) -> None:
        """Wait for the moment. Nothing slow may run between seeing it and killing."""
        names, partials = {path.name for path in checkpoints_of(self.run_dir)}, self.partials()
        if moment == STEP:
            time.sleep(draw.uniform(0.0, usual.step))
        elif moment == WRITE:
            self.wait(lambda: self.partials() - partials, look=False)
            time.sleep(draw.uniform(0.0, usual.write))
        elif moment == PRUNE:
            self.wait(self.retired, look=False)
        elif draw.random() < 0.5:  # before the rename, else after it
            self.wait(lambda: list((self.run_dir / CHECKPOINTS).glob(f".*.partial/{MANIFEST}")), look=False)
        else:
            self.wait(lambda: {path.name for path in checkpoints_of(self.run_dir)} - names, look=False)

    def _interrupted(self, logged: int) -> str:
        if self.retired():
            return PRUNE
        for partial in self.partials():
            return COMMIT if (self.run_dir / CHECKPOINTS / partial / MANIFEST).exists() else WRITE
        return STEP if self.steps() > logged else START
