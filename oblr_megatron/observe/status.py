"""RUN_DIR/status.json: the state of a run. Rank 0 writes it at the start, after steps, every 10 s, and at the end.

    {
      "state": "stopped",            running, stopped (before its last step, saved), finished or failed
      "step": 120,                   the last one done
      "num_steps": 500,
      "reason": "SIGUSR1",           why it stopped or failed; empty otherwise
      "unix_time": 1764000000.0,     when the file was written; the heartbeat of a running run
      "pid": 4711,                   rank 0's process
      "host": "node3",
      "process": "5e1f...:4026531836:4711:8123456"      boot, namespace, process id, start: see Owner
    }

One key a line in this order, so that a shell can read it with sed (slurm/lib.sh). The file is written under another
name and renamed, so a reader sees the old file or the new one, never a part. A killed process leaves "running";
`read_status` then says "lost", because the process is gone or its heartbeat is old.
"""

from __future__ import annotations

import errno
import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from oblr_megatron.checks.run_dir import CONFIG_FILE, LOGS
from oblr_megatron.errors import UserError
from oblr_megatron.metrics import write_whole
from oblr_megatron.runtime.command_line import reason_of
from oblr_megatron.runtime.run_lock import HEARTBEAT_S, Owner, repeated

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.runtime.stopping import StopRequest

STATUS_FILE = "status.json"
LOOK_S = 1.0  # between two looks at the step of a run that goes on
State = Literal["running", "stopped", "finished", "failed", "lost"]


@dataclass(frozen=True, slots=True)
class Status:
    """The content of status.json; its state is "lost" only after `read_status`.

    Example: Status("stopped", 120, 500, "SIGUSR1", 1764000000.0, 4711, "node3", "5e1f...:4026531836:4711:8123")
    """

    state: State
    step: int
    num_steps: int
    reason: str
    unix_time: float
    pid: int = 0
    host: str = ""
    process: str = ""

    def __str__(self) -> str:
        steps = f"step {self.step} of {self.num_steps}"
        process = f"process {self.pid} on {self.host}"
        ago = f"{max(time.time() - self.unix_time, 0):.0f} s ago"
        if self.state == "running":
            return f"running: {steps}, {process}, heartbeat {ago}"
        if self.state == "lost":
            return f"lost: {process} was last seen {ago} after {steps}; continue with --resume"
        return f"{self.state}: {steps}" + (f", {self.reason}" if self.reason else "")


def write_status(run_dir: Path, status: Status) -> None:
    """Replace the file."""
    write_whole(run_dir / STATUS_FILE, json.dumps(asdict(status), indent=2) + "\n")


def read_status(run_dir: Path) -> Status:
    """The status of a run; "lost" for a run that was killed.

    Raises:
        UserError: there is no status.json, or it cannot be read or is damaged.
    """
    path = run_dir / STATUS_FILE
    try:
        status = Status(**json.loads(_text(path)))
        status = replace(status, unix_time=float(status.unix_time))
    except FileNotFoundError:
        raise UserError("no run has started here", where=str(path), fix="give the run_dir of a run") from None
    except OSError as error:
        what = f"cannot read the status: {error.strerror}"
        raise UserError(what, where=str(path), fix="make it readable") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"the status is damaged: {error}", where=str(path), fix="remove this file") from None
    owner = Owner(status.pid, status.host, status.process, status.unix_time, status.unix_time)
    return replace(status, state="lost") if status.state == "running" and not owner.is_alive() else status


def _text(path: Path) -> str:
    """The text of a file that another host may replace while this one reads it."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return path.read_text(encoding="utf-8")  # the new file


def finished(config: Config, *, rank: int = 0) -> bool:
    """Whether a run to resume has done all of its steps and has its export; rank 0 then says so.

    The time in status.json is renewed, because a job script waits for a status of its own attempt.
    """
    if config.checkpoint.resume == "none":
        return False
    with suppress(UserError):
        status = read_status(config.run_dir)
        if _only_sampled(config.run_dir) not in (None, config.rollout.only):
            return False
        exported = config.rollout.only or not config.checkpoint.export_hf or (config.run_dir / "hf").exists()
        if status.state == "finished" and status.step >= config.num_steps and exported:
            if rank == 0:
                write_status(config.run_dir, replace(status, unix_time=time.time()))
                print(f"{config.run_dir}: {status}; nothing is left to do")
            return True
    return False


def _only_sampled(run_dir: Path) -> bool | None:
    """`rollout.only` of the run in a directory; None if its configuration cannot be read."""
    try:
        return bool(json.loads((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))["rollout"]["only"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


class Observed(Protocol):
    """The parts of an open run that status.json reports."""

    config: Config
    parallel: Parallel
    stop: StopRequest
    done: int  # steps that are done
    stopped_by: str | None  # why it stopped before its last step

    @property
    def start(self) -> int:
        """Steps that were done when this process started."""
        ...


@contextmanager
def recorded(run: Observed) -> Iterator[None]:
    """Keep status.json of an open run up to date; only rank 0 writes. Every rank logs the traceback of its failure."""
    if run.parallel.rank != 0:
        with _logged(run):
            yield
        return
    me = Owner.me()

    def write(state: State, reason: str = "") -> None:
        step = max(run.start, run.done)
        with suppress(OSError):  # a full disk does not change how a run ends
            now = time.time()
            status = Status(state, step, run.config.num_steps, reason, now, me.pid, me.host, me.process)
            write_status(run.config.run_dir, status)

    written: tuple[int, float] = (-1, 0.0)  # the step and the time of the last heartbeat

    def beat() -> None:
        nonlocal written
        if run.done != written[0] or time.monotonic() - written[1] >= HEARTBEAT_S:
            written = run.done, time.monotonic()
            write("running")

    run.stop.at_once = lambda reason: write("failed", reason)
    try:
        with repeated(beat, LOOK_S), _logged(run):
            yield
    except BaseException as error:  # status.json names every kind of end, then the error goes on
        write("failed", " ".join((reason_of(error) or f"{type(error).__name__}: {error}").split()))
        raise
    write("finished" if run.stopped_by is None else "stopped", run.stopped_by or "")


@contextmanager
def _logged(run: Observed) -> Iterator[None]:
    """Append the traceback of a failure to RUN_DIR/logs/rank-R.log; the console gets one line."""
    try:
        yield
    except Exception:  # the log names every error, then it goes on
        with suppress(OSError):  # a full disk
            folder = run.config.run_dir / LOGS
            folder.mkdir(exist_ok=True)
            with (folder / f"rank-{run.parallel.rank}.log").open("a", encoding="utf-8") as file:
                file.write(traceback.format_exc())
        raise
