"""Jobs under the SLURM stand-in: the real scripts on two nodes with one CPU rank each, with replayed samples."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.conftest import ROOT, environment

SCRIPT = "slurm/oblr_qwen3_0.6b.sh"
NODES = "127.0.0.[1-2]"
JOB_ID = 4711
LIMIT_S = 300.0


@dataclass
class Job:
    """A job in its own directory, with its settings and its results."""

    directory: Path
    config: Path
    script: str = SCRIPT
    arguments: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    def output(self) -> str:
        """The job's output file; sbatch(1) appends to it with --open-mode=append."""
        return (self.directory / "job.out").read_text()

    def log(self, name: str, attempt: int = 0) -> str:
        return (self.logs / f"attempt_{attempt}" / name).read_text()

    def status(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "status.json").read_text())

    @contextmanager
    def submitted(self) -> Iterator[subprocess.Popen[str]]:
        """The running job; all its processes are ended after the block."""
        self.directory.mkdir(exist_ok=True)
        given = {"job_id": JOB_ID, "nodes": NODES} | self.settings
        (self.directory / "settings.json").write_text(json.dumps(given))
        bin_dir = ROOT / "tests" / "slurm" / "bin"
        own = {
            "STANDIN": str(self.directory),
            "STANDIN_PYTHON": sys.executable,
            "PATH": f"{bin_dir}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OBLR_VENV": sys.prefix,
            "OBLR_CONFIG": str(self.config),
            "OBLR_GPUS_PER_NODE": "0",
            "OBLR_LOGS": str(self.logs),
            "OBLR_DRY_RUN": "0",
            "OBLR_PREFLIGHT_S": "120",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [str(bin_dir / "sbatch"), self.script, *self.arguments, f"run_dir={self.run_dir}"]
        job = subprocess.Popen(
            command, cwd=ROOT, env=environment() | own | self.variables, stderr=subprocess.PIPE, text=True
        )
        try:
            yield job
            _, alive = psutil.wait_procs(self._alive(), timeout=20)
            assert not alive, [process.cmdline() for process in alive]
        finally:
            for process in self._alive():
                process.kill()
            if job.poll() is None:
                job.kill()
            job.communicate()

    def run(self) -> int:
        """Run the job to its end; return its status."""
        with self.submitted() as job:
            job.communicate(timeout=LIMIT_S)
        return job.returncode

    def signal(self, number: signal.Signals) -> None:
        """Signal only the batch script, as --signal=B: does."""
        os.kill(int((self.directory / "job.pid").read_text()), number)

    def wait_for(self, condition: Callable[[], bool], job: subprocess.Popen[str]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert job.poll() is None, self.output()[-3000:]
            assert time.monotonic() < end, self.output()[-3000:]
            time.sleep(0.02)

    def _alive(self) -> list[psutil.Process]:
        """Processes with this job's directory in their environment, including sbatch."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("STANDIN") == str(self.directory):
                    found.append(process)
            except psutil.Error:  # the process is another user's or has ended
                continue
        return found
