"""The process of one tracker: `python -m oblr_megatron.observe.trackers.process RUN_PID NAME`, started by feed.py.

It reads one message a line from standard input and answers each on its first standard output: {"error": null}, or the
text of an exception. What packages print goes to the log that standard error is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from oblr_megatron.observe.trackers.base import TrackedRun, Tracker
from oblr_megatron.observe.trackers.registry import open_tracker
from oblr_megatron.runtime.processes import die_with

IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
"""Signals for the run: it finishes its step and then closes its trackers."""


def main(run_pid: int, name: str) -> None:
    """Open the tracker of the first message and hand the others to it, until standard input ends."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    die_with(run_pid)
    given = os.dup(0), os.dup(1)  # packages and their processes get other streams
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    with os.fdopen(given[0], encoding="utf-8") as messages, os.fdopen(given[1], "w", encoding="utf-8") as replies:
        _serve(name, messages, replies)


def _serve(name: str, messages: IO[str], replies: IO[str]) -> None:
    tracker: Tracker | None = None
    for line in messages:
        message: dict[str, Any] = json.loads(line)
        kind, error = message.pop("kind"), None
        try:
            if kind == "open":
                tracker = open_tracker(TrackedRun(name, **message | {"run_dir": Path(message["run_dir"])}))
            elif tracker is None:
                error = "it could not be opened"
            elif kind == "file":
                tracker.file(Path(message["path"]))
            else:
                getattr(tracker, kind)(**message)
        except Exception as caught:  # noqa: BLE001  a package may raise anything; the run goes on without this record
            with suppress(OSError):  # the log's disk is full
                traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}"
        print(json.dumps({"error": error}), file=replies, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
