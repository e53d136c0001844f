"""Do runs in parallel processes, each with a deadline. Complete runs are not repeated; interrupted ones restart.

Every run is a process in its own session and ends when this process ends. After Ctrl-C, finished runs remain and the
next call continues with the others. A failed run does not stop the others.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oblr_megatron.errors import UserError
from oblr_megatron.metrics import write_whole
from oblr_megatron.runtime.processes import die_with
from studies.results import ASKED_FILE, Key, asked_of, first_difference, is_whole

LOG_FILE = "log.txt"
POLL_S = 0.05
WORKER = (sys.executable, "-m", "studies.worker")
ROOT = Path(__file__).resolve().parents[1]
FORKED = ("toy", "trl_grpo", "trl_rloo")  # for these backends, imports take as long as a short run


@dataclass(frozen=True)
class Job:
    """One run of the study."""

    key: Key
    run_dir: Path
    backend: str
    config: dict[str, Any]  # ToyConfig as JSON
    worker: Sequence[str] = field(default=WORKER, compare=False)  # command, called with the path of asked.json

    @property
    def asked(self) -> dict[str, Any]:
        """Contents of asked.json."""
        return {"backend": self.backend, "config": self.config}

    def is_done(self) -> bool:
        """Whether the run is complete.

        Raises:
            UserError: the run is complete but has another config; or its directory holds something else.
        """
        found = asked_of(self.run_dir)
        if found is None or not is_whole(self.run_dir, found["backend"], int(found["config"]["num_steps"])):
            return False
        difference = first_difference(self.asked, found)
        if difference:
            fix = "restore the plan, remove the directory and its line in rows.jsonl, or give another --out"
            raise UserError(f"this run belongs to another plan: {difference}", where=str(self.run_dir), fix=fix)
        return True


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has ended. Example: Ended(job, "status 1: error: ...", 31.2)."""

    job: Job
    fault: str  # empty if the run is complete
    seconds: float


class _Forked:
    """A run forked from a server that has imported the toy trainer; implements the parts of Popen used here."""

    def __init__(self, asked: Path, log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["studies.fork_server"])
        self._process = context.Process(target=forked, args=(asked, log))
        self._process.start()
        assert self._process.pid is not None, "the process was started"
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit status, or None while the process runs."""
        return self._process.exitcode

    def wait(self) -> int | None:
        """Kill and reap. `killpg` may have missed a process that had not yet opened its session."""
        self._process.kill()
        self._process.join()
        return self._process.exitcode


def forked(asked: Path, log: Path) -> None:
    """Do the run, in the forked process."""
    import torch

    from studies.worker import main

    os.setsid()
    die_with(os.getppid())  # the fork server, which ends with the study (studies/fork_server.py)
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    torch.set_num_threads(1)
    sys.exit(main([str(asked)]))


def spawned(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a run in a new interpreter."""
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=child_environment(),
            start_new_session=True,
        )


def child_environment() -> dict[str, str]:
    """The environment of a process with one thread that imports `studies`, which is not installed, from anywhere."""
    path = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}


class Running:
    """A job that runs in a process."""

    def __init__(self, job: Job, deadline_s: float) -> None:
        self.job, self._deadline_s = job, deadline_s
        shutil.rmtree(job.run_dir, ignore_errors=True)  # an interrupted run
        job.run_dir.mkdir(parents=True)
        asked, log = job.run_dir / ASKED_FILE, job.run_dir / LOG_FILE
        write_whole(asked, json.dumps(job.asked, indent=2) + "\n")
        self._start = time.monotonic()
        forks = job.backend in FORKED and job.worker == WORKER and job.config.get("recipe") is None
        self._process = _Forked(asked, log) if forks else spawned([*job.worker, str(asked)], log)

    def ended(self) -> Ended | None:
        """The result if the run has ended, else None. Kills the run once its deadline has passed."""
        seconds = time.monotonic() - self._start
        status = self._process.poll()
        if status is None and seconds < self._deadline_s:
            return None
        self.kill()
        return Ended(self.job, self._fault(status), seconds)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        with suppress(ProcessLookupError):  # the process group is gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _fault(self, status: int | None) -> str:
        """Why the run is incomplete; empty if it is complete, whatever the exit status."""
        try:
            if self.job.is_done():
                return ""
        except UserError as error:  # the run left damaged files
            return str(error)
        if status is None:
            return f"ran past its deadline of {self._deadline_s:g} s"
        how = signal.Signals(-status).name if status < 0 else f"status {status}"  # 0: an evaluation is missing
        return f"{how}: {last_line(self.job.run_dir / LOG_FILE)}"


def last_line(log: Path) -> str:
    """The last line that a run printed, which holds its error."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def to_do(jobs: Iterable[Job]) -> list[Job]:
    """The unfinished jobs, each once.

    Raises:
        UserError: a run is complete but has another config.
    """
    return [job for job in {job.run_dir: job for job in jobs}.values() if not job.is_done()]


def run_jobs(jobs: Sequence[Job], *, processes: int, deadline_s: float, report: Callable[[Ended], None]) -> list[Ended]:
    """Do the jobs from `to_do`; returns the failed ones.

    Args:
        jobs: started in this order.
        processes: largest number of parallel runs.
        deadline_s: of each run, seconds.
        report: called with each run that ends.
    """
    waiting, running, failed = list(jobs), list[Running](), list[Ended]()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                running.append(Running(waiting.pop(0), deadline_s))
            for ended in _collect(running):
                report(ended)
                if ended.fault:
                    failed.append(ended)
            time.sleep(POLL_S)
    finally:
        for left in running:
            left.kill()
    return failed


def _collect(running: list[Running]) -> list[Ended]:
    """Remove and return the runs that have ended."""
    found = []
    for each in list(running):
        ended = each.ended()
        if ended:
            running.remove(each)
            found.append(ended)
    return found
