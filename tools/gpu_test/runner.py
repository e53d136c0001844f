"""Runs a line in a process of its own, with a deadline."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from oblr_megatron.runtime.processes import alive, children_of, identity
from tools.gpu_test.line import Line
from tools.gpu_test.report import ROOT, read

GRACE_S = 15.0
"""Time between SIGTERM and SIGKILL, in which launchers and engines end their own processes."""
KILLED_S = 60.0
"""Most seconds until a killed process has ended: its driver frees its memory first."""
REHEARSAL_MINUTES = 25.0
"""A line's own limit is for a GPU, and a CPU may be busy."""
POLL_S = 0.2
INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Run:
    """What a process left. Example: Run({"step / plain, bookkeep": 1.2}, 81.0, "ended at its limit of 5 minutes")."""

    figures: dict[str, float | str]
    seconds: float
    failure: str  # "" if it ended with status 0, INTERRUPTED after Ctrl-C


def run(line: Line, log: Path, *, rehearse: bool = False, beat: Callable[[], None] = lambda: None) -> Run:
    """Run a line to its end, to its deadline or to Ctrl-C; the figures that it reported until then are kept.

    Args:
        line: what to run.
        log: file of everything that it prints.
        rehearse: on a CPU, with the line's tiny sizes.
        beat: called while it runs, e.g. to draw the progress.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    minutes = REHEARSAL_MINUTES if rehearse else line.minutes
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    if rehearse:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="gpu-test-", ignore_cleanup_errors=True) as directory, log.open("w") as out:
        report = Path(directory) / "report.jsonl"
        arguments = json.dumps({**line.arguments, **(line.rehearsal if rehearse else {})})
        command = [sys.executable, "-m", "tools.gpu_test.child", line.measure, str(report), arguments]
        begin, ended, interrupted = time.monotonic(), False, False
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"TMPDIR": directory},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended = _wait(child, begin + 60 * minutes, beat)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            _end(child)
        figures, seconds = read(report), time.monotonic() - begin
    if interrupted:
        return Run(figures, seconds, INTERRUPTED)
    if not ended:
        return Run(figures, seconds, f"ended at its limit of {minutes:g} minutes")
    return Run(figures, seconds, _failure(child.returncode, log))


def _wait(child: subprocess.Popen[bytes], deadline: float, beat: Callable[[], None]) -> bool:
    """Whether the process ended before the deadline."""
    while time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)
            return True
        beat()
    return False


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started, gently first. A rank of torchrun is in a session of its own."""
    family = [] if child.returncode is not None else _family(child.pid)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)  # also what an ended process left behind
    with suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for one in filter(alive, family):
        with suppress(ProcessLookupError):
            os.kill(int(one.partition(":")[0]), signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + KILLED_S
    while any(map(alive, family)) and time.monotonic() < deadline:  # its memory would disturb the next line
        time.sleep(POLL_S)


def _family(pid: int) -> list[str]:
    """Identities of all processes below one."""
    found = []
    for child in children_of(pid):
        with suppress(ProcessLookupError):
            found += [identity(child), *_family(child)]
    return found


def _failure(status: int, log: Path) -> str:
    """Why a process failed: the end of its traceback, or of its output."""
    if status == 0:
        return ""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[\w+\]: )?(\w+\.)*\w*(Error|Exception)\b", line)]
    what = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return f"{what}: {(errors or lines or ['no output'])[-1]:.200}"
