"""RUN_DIR/status.json: the state of a run, written by rank 0 when the run starts and when it ends.

    {
      "state": "stopped",            running, stopped (before its last step, saved), finished or failed
      "step": 120,                   the last one done
      "num_steps": 500,
      "reason": "SIGUSR1",           why it stopped or failed; empty otherwise
      "unix_time": 1764000000.0
    }

One key a line in this order, so that a shell can read it with sed (slurm/lib.sh). The file is written under another
name and renamed, so a reader sees the old file or the new one, never a part. A killed process leaves "running".
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from oblr_megatron.metrics import write_whole

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.model.parallel import Parallel

STATUS_FILE = "status.json"
State = Literal["running", "stopped", "finished", "failed"]


@dataclass(frozen=True, slots=True)
class Status:
    """The content of status.json.

    Example: Status(state="stopped", step=120, num_steps=500, reason="SIGUSR1", unix_time=1764000000.0)
    """

    state: State
    step: int
    num_steps: int
    reason: str
    unix_time: float


def write_status(run_dir: Path, status: Status) -> None:
    """Replace the file."""
    write_whole(run_dir / STATUS_FILE, json.dumps(asdict(status), indent=2) + "\n")


class Observed(Protocol):
    """The parts of an open run that status.json reports."""

    config: Config
    parallel: Parallel
    done: int  # steps that are done
    stopped_by: str | None  # why it stopped before its last step

    @property
    def start(self) -> int:
        """Steps that were done when this process started."""
        ...


@contextmanager
def recorded(run: Observed) -> Iterator[None]:
    """Keep status.json of an open run up to date; only rank 0 writes."""

    def write(state: State, reason: str = "") -> None:
        if run.parallel.rank == 0:
            step = max(run.start, run.done)
            with suppress(OSError):  # a full disk does not change how a run ends
                write_status(run.config.run_dir, Status(state, step, run.config.num_steps, reason, time.time()))

    write("running")
    try:
        yield
    except BaseException as error:  # status.json names every kind of end, then the error goes on
        write("failed", " ".join(f"{type(error).__name__}: {error}".split()))
        raise
    write("finished" if run.stopped_by is None else "stopped", run.stopped_by or "")
