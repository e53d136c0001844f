"""Runs as processes: several at once, each with a deadline, whole ones not repeated, cut ones done again.

Every run is a process of its own, in a session of its own, that ends when this one does: Ctrl-C leaves the runs that
were finished, and the next call goes on with the others. A run that fails does not end the rest.
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
from oblr_megatron.runtime.stopping import die_with
from studies.results import ASKED_FILE, Key, asked_of, first_difference, is_whole

LOG_FILE = "log.txt"
POLL_S = 0.05
WORKER = (sys.executable, "-m", "studies.worker")
FORKED = ("toy", "trl_grpo", "trl_rloo")  # backends whose imports take as long as a short run


@dataclass(frozen=True)
class Job:
    """One run of the study."""

    key: Key
    run_dir: Path
    backend: str
    config: dict[str, Any]  # LabConfig as JSON
    needs: Job | None = None  # the run whose learning rates it takes
    worker: Sequence[str] = field(default=WORKER, compare=False)  # called with the path of asked.json

    @property
    def asked(self) -> dict[str, Any]:
        """What asked.json holds."""
        return {"backend": self.backend, "config": self.config}

    def is_done(self) -> bool:
        """Whether there is nothing to do.

        Raises:
            UserError: the run is whole, but of another config; or its directory holds something else.
        """
        found = asked_of(self.run_dir)
        if found is None or not is_whole(self.run_dir, found["backend"], int(found["config"]["num_steps"])):
            return False
        difference = first_difference(self.asked, found)
        if difference:
            fix = "restore the plan, remove the directory, or give another --out"
            raise UserError(f"this run is of another plan: {difference}", where=str(self.run_dir), fix=fix)
        return True


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has ended. Example: Ended(job, "status 1: error: ...", 31.2)."""

    job: Job
    fault: str  # empty: it is whole
    seconds: float


class _Forked:
    """A run as a fork of a server that has imported the laboratory; as much of Popen as is needed."""

    def __init__(self, asked: Path, log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["studies.toy_trainer"])
        self._process = context.Process(target=forked, args=(asked, log))
        self._process.start()
        assert self._process.pid is not None, "it was started"
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """As Popen's."""
        return self._process.exitcode

    def wait(self) -> int | None:
        """As Popen's; for a process that was told to end: it may not have begun its session yet."""
        self._process.kill()
        self._process.join()
        return self._process.exitcode


def forked(asked: Path, log: Path) -> None:
    """The run, in the fork."""
    import torch

    from studies.worker import main

    os.setsid()
    die_with(os.getppid())  # the server, which ends with the study
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    torch.set_num_threads(1)
    sys.exit(main([str(asked)]))


def spawned(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A run as a process from scratch."""
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


class Running:
    """A job as a process."""

    def __init__(self, job: Job, deadline_s: float) -> None:
        self.job, self._deadline_s = job, deadline_s
        shutil.rmtree(job.run_dir, ignore_errors=True)  # a run that was cut
        job.run_dir.mkdir(parents=True)
        asked, log = job.run_dir / ASKED_FILE, job.run_dir / LOG_FILE
        write_whole(asked, json.dumps(job.asked, indent=2) + "\n")
        self._start = time.monotonic()
        forks = job.backend in FORKED and job.worker == WORKER
        self._process = _Forked(asked, log) if forks else spawned([*job.worker, str(asked)], log)

    def ended(self) -> Ended | None:
        """How it ended, or None; past its deadline it is ended here."""
        seconds = time.monotonic() - self._start
        status = self._process.poll()
        if status is None and seconds < self._deadline_s:
            return None
        self.kill()
        return Ended(self.job, self._fault(status), seconds)

    def kill(self) -> None:
        """End the process and what it started, at once."""
        with suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _fault(self, status: int | None) -> str:
        """Why the run is not whole; empty if it is, whatever its process did after the last step."""
        try:
            if self.job.is_done():
                return ""
        except UserError as error:  # it left damaged files
            return str(error)
        if status is None:
            return f"ran past its deadline of {self._deadline_s:g} s"
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"{how}: {last_line(self.job.run_dir / LOG_FILE)}"


def last_line(log: Path) -> str:
    """Of what a run printed, where its error stands."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def to_do(jobs: Iterable[Job]) -> list[Job]:
    """The jobs that are not done, and those they need, each once and after those it needs.

    Raises:
        UserError: one is whole, but of another config.
    """
    ordered: dict[Path, Job] = {}
    for job in jobs:
        for each in (job.needs, job) if job.needs else (job,):
            ordered.setdefault(each.run_dir, each)
    return [job for job in ordered.values() if not job.is_done()]


def run_jobs(jobs: Sequence[Job], *, processes: int, deadline_s: float, report: Callable[[Ended], None]) -> list[Ended]:
    """Run what `to_do` left; those that failed.

    Args:
        processes: at once.
        deadline_s: of one run.
        report: called with each run that ends.
    """
    waiting, running, failed = list(jobs), list[Running](), list[Ended]()
    try:
        while waiting or running:
            _start(waiting, running, processes, deadline_s)
            for ended in _collect(running):
                report(ended)
                if ended.fault:
                    failed.append(ended)
                    failed += _give_up(waiting, ended.job, report)
            time.sleep(POLL_S)
    finally:
        for left in running:
            left.kill()
    return failed


def _start(waiting: list[Job], running: list[Running], processes: int, deadline_s: float) -> None:
    """As many as there is room for, of those whose needs are met."""
    unfinished = {job.run_dir for job in waiting} | {each.job.run_dir for each in running}
    for job in list(waiting):
        if len(running) >= processes:
            return
        if job.needs is None or job.needs.run_dir not in unfinished:
            waiting.remove(job)
            running.append(Running(job, deadline_s))


def _collect(running: list[Running]) -> list[Ended]:
    """Take out those that have ended."""
    found = []
    for each in list(running):
        ended = each.ended()
        if ended:
            running.remove(each)
            found.append(ended)
    return found


def _give_up(waiting: list[Job], failed: Job, report: Callable[[Ended], None]) -> list[Ended]:
    """Take out those that would have needed a run that failed."""
    lost = [
        Ended(job, f"not run: {failed.key} failed, whose learning rates it takes", 0.0)
        for job in waiting
        if job.needs is not None and job.needs.run_dir == failed.run_dir
    ]
    for ended in lost:
        waiting.remove(ended.job)
        report(ended)
    return lost
