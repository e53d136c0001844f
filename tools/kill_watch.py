"""The moments at which a run is killed, seen from outside: what it logs, and which checkpoints lie on its disk."""

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
from soak_watch import Family

from oblr_megatron.checkpoint.store import CHECKPOINTS, MANIFEST, checkpoints_of

START, STEP, WRITE, COMMIT, PRUNE = MOMENTS = ("start", "step", "write", "commit", "prune")
"""Before its first step; in a step, nothing being written; a checkpoint half written; whole, but for its name; an older
one half removed."""
POLL_S = 0.0001
LOOK_S = 0.5  # between two looks at the processes, which take longer than a tiny checkpoint
RANK = "oblr_megatron.train"


@dataclass(slots=True)
class Usual:
    """What things take in the run that is left alone, seconds; delays are drawn up to these."""

    start: float  # from the process's start to the end of its first step
    step: float
    write: float  # from a checkpoint's directory to its name


@dataclass(slots=True)
class Attempt:
    """One start of a run."""

    job: subprocess.Popen[bytes]
    run_dir: Path
    limit_s: float  # of every wait
    family: Family = field(init=False)

    def __post_init__(self) -> None:
        self.family = Family(psutil.Process(self.job.pid))

    def kill(self, moment: str, usual: Usual, draw: random.Random) -> str | None:
        """Wait for a moment of that kind and a random part of it, then kill launcher and ranks with SIGKILL.

        Returns:
            The moment it was by what lies on the disk; None if the run had ended.
        """
        logged = self.steps()
        if moment == START:
            self.wait(lambda: False, draw.uniform(0.0, usual.start))
        else:
            further = logged + draw.randint(0, 2)
            self.wait(lambda: self.steps() > further)
        self.family.look()
        victims = [process for process in self.family.seen.values() if RANK in _command(process)] + [self.family.root]
        if moment != START:
            self._await(moment, usual, draw)
        if self.job.poll() is not None:
            return None
        for process in victims:
            process.kill()
        self.job.wait()
        return self._interrupted(logged)

    def measure(self) -> Usual:
        """Follow a run that is left alone to its end."""
        begin, first, begun = time.monotonic(), 0.0, 0.0
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
        steps = max(1, self.steps() - 1)
        step = (time.monotonic() - begin - first) / steps
        return Usual(start=first, step=step, write=statistics.median(took) if took else step)

    def wait_for_end(self) -> None:
        """Until the run has ended."""
        self.wait(lambda: False)

    def wait(self, condition: Callable[[], Any], seconds: float | None = None, *, look: bool = True) -> None:
        """Until the condition holds, the run has ended, or the time is over; meanwhile see what the run starts."""
        end = time.monotonic() + (self.limit_s if seconds is None else seconds)
        looked = 0.0
        while not condition() and self.job.poll() is None and time.monotonic() < end:
            if look and time.monotonic() - looked > LOOK_S:
                self.family.look()
                looked = time.monotonic()
            time.sleep(POLL_S)

    def steps(self) -> int:
        """Lines of the metrics file."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def partials(self) -> set[str]:
        """Checkpoints without a name."""
        return {path.name for path in (self.run_dir / CHECKPOINTS).glob(".*.partial")}

    def retired(self) -> bool:
        """Whether a checkpoint older than another has lost its name."""
        names = os.listdir(self.run_dir / CHECKPOINTS) if (self.run_dir / CHECKPOINTS).is_dir() else []
        newest = max((name for name in names if not name.startswith(".")), default="")
        return any(name.startswith(".") and name[1:] < newest for name in names)

    def _await(self, moment: str, usual: Usual, draw: random.Random) -> None:
        """From here on nothing slow is done between seeing and killing."""
        names, partials = {path.name for path in checkpoints_of(self.run_dir)}, self.partials()
        if moment == STEP:
            time.sleep(draw.uniform(0.0, usual.step))
        elif moment == WRITE:
            self.wait(lambda: self.partials() - partials, look=False)
            time.sleep(draw.uniform(0.0, usual.write))
        elif moment == PRUNE:
            self.wait(self.retired, look=False)
        elif draw.random() < 0.5:  # it has its manifest, or its name
            self.wait(lambda: list((self.run_dir / CHECKPOINTS).glob(f".*.partial/{MANIFEST}")), look=False)
        else:
            self.wait(lambda: {path.name for path in checkpoints_of(self.run_dir)} - names, look=False)

    def _interrupted(self, logged: int) -> str:
        if self.retired():
            return PRUNE
        for partial in self.partials():
            return COMMIT if (self.run_dir / CHECKPOINTS / partial / MANIFEST).exists() else WRITE
        return STEP if self.steps() > logged else START


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # ended meanwhile
        return ""
