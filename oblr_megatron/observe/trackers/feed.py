"""The run's side of its trackers: one process each, fed through a bounded queue, with a deadline at the end."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oblr_megatron.checks.run_dir import LOGS
from oblr_megatron.observe.trackers.base import State
from oblr_megatron.observe.trackers.names import tracked
from oblr_megatron.runtime.processes import children_of, python_module

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.metrics import Record
    from oblr_megatron.observe.alarms import Alarm

PROCESS = "oblr_megatron.observe.trackers.process"
WAITING = 1000  # messages that wait for a slow tracker; further ones are lost
CLOSE_SECONDS = 120.0  # that all trackers together have at the end of a run, e.g. for an upload
DRAIN_S = 1.0  # for what a process that has ended or is killed leaves behind
LONGEST_SHOWN = 300  # characters of an error on the console
ENDED = "its process has ended"


class Trackers:
    """The trackers of a run; on ranks other than 0 it has none. No method waits for a tracker but the end of the block.

        with Trackers(config, say, rank=0, resume_step=None) as trackers:
            trackers.start()
            trackers.log({"step": 1, "reward/mean": 0.53})

    Args:
        config: of the run.
        say: shows a line; called from this thread only.
        rank: of this process.
        resume_step: last step of the resumed checkpoint; None for a new run.
    """

    def __init__(self, config: Config, say: Callable[[str], None], *, rank: int, resume_step: int | None) -> None:
        self.names = config.log.trackers if rank == 0 else ()
        self._config, self._say, self._resume_step = config, say, resume_step
        self._feeds: list[TrackerFeed] = []
        self.state: State = "finished"  # how the run ends, for the trackers

    def start(self) -> None:
        """Start the processes. A tracker that cannot be opened says so later and changes nothing else."""
        log, run_dir = self._config.log, self._config.run_dir
        self._feeds = [TrackerFeed(name, run_dir / LOGS / f"tracker-{name}.log") for name in self.names]
        self._send(
            "open",
            run_dir=str(run_dir),
            name=log.run_name or run_dir.resolve().name,
            project=log.project,
            config=self._config.model_dump(mode="json"),
            resume_step=self._resume_step,
        )

    def log(self, record: Record) -> None:
        """Send the metrics of a step, as written to metrics.jsonl."""
        values = tracked(record, self._config.evaluate.samples_per_prompt)
        self._send("log", step=record["step"], values=values)

    def alarm(self, alarm: Alarm) -> None:
        """Send an alarm."""
        self._send("alarm", step=alarm.step, name=alarm.name, text=alarm.text)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Send responses of an evaluation."""
        self._send("table", step=step, name=name, columns=columns, rows=rows)

    def file(self, path: Path) -> None:
        """Send a file that does not change until the trackers are closed."""
        self._send("file", path=str(path))

    def _send(self, kind: str, **content: Any) -> None:
        for feed in self._feeds:
            feed.send({"kind": kind, **content})
            if feed.error is not None and not feed.told:
                feed.told = True
                self._say(f"tracker {feed.name}: {feed.error}; the run goes on, see {feed.log}")

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the trackers, all within CLOSE_SECONDS, and say what was lost."""
        self._send("close", state=self.state if kind is None else "failed")
        end = time.monotonic() + CLOSE_SECONDS
        for feed in self._feeds:
            feed.finish()
        for feed in self._feeds:
            late = not feed.join(end - time.monotonic())
            if late or feed.lost:
                cause = f"not done within {CLOSE_SECONDS:g} s" if late else ENDED
                self._say(
                    f"tracker {feed.name}: {feed.lost:,} of {feed.sent:,} records were lost: "
                    f"{feed.error or cause}; see {feed.log}"
                )
        self._feeds.clear()


class TrackerFeed:
    """One tracker's process, the queue of its messages, and the count of those that it has acknowledged."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.log = name, log
        self.sent = self._taken = 0
        self.error: str | None = None  # the first one
        self.told = False
        self._queue: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._ending = threading.Event()
        self._process = self._started()
        self._reader = threading.Thread(target=self._read, name=f"tracker-{name}", daemon=True)
        if self._process is not None:
            self._reader.start()
            threading.Thread(target=self._write, name=f"tracker-{name}", daemon=True).start()

    @property
    def lost(self) -> int:
        """Messages that were not acknowledged; until the end some may still be on their way."""
        return self.sent - self._taken

    def _started(self) -> subprocess.Popen[bytes] | None:
        command = [*python_module(PROCESS), str(os.getpid()), self.name]
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                own = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}  # it is no rank
                return subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True, env=own
                )
        except OSError as error:  # a full disk, no memory for a process
            self.error = str(error)
            return None

    def send(self, message: Mapping[str, Any]) -> None:
        """Put a message into the queue; it is lost if the queue is full."""
        self.sent += 1
        with suppress(queue.Full):
            self._queue.put_nowait(json.dumps(message).encode() + b"\n")

    def _write(self) -> None:
        assert self._process is not None and self._process.stdin is not None, "started with pipes"
        with suppress(OSError), self._process.stdin as stdin:  # the process has ended
            while not (self._ending.is_set() and self._queue.empty()):
                line = self._queue.get()
                if line is not None:
                    stdin.write(line)
                    stdin.flush()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None, "started with pipes"
        for line in self._process.stdout:
            error = json.loads(line)["error"]
            if error is None:
                self._taken += 1
            elif self.error is None:
                self.error = " ".join(error.split())[:LONGEST_SHOWN]
        if not self._ending.is_set():
            self.error = self.error or ENDED

    def finish(self) -> None:
        """Let the process end after the messages that it was sent."""
        self._ending.set()
        with suppress(queue.Full):  # then the writer does not wait for a message
            self._queue.put_nowait(None)

    def join(self, seconds: float) -> bool:
        """Wait for the process, then kill it with its descendants; whether it ended by itself."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            for pid in _family(self._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a system call on a hanging file system outlasts the signal
                self._process.wait(DRAIN_S)
            return False
        self._reader.join(DRAIN_S)  # for replies that are still in the pipe
        return True


def _family(pid: int) -> list[int]:
    """A process and its descendants, parents first: a killed parent starts no further child."""
    return [pid, *(one for child in children_of(pid) for one in _family(child))]
