"""Jobs of the scripts in slurm/ under the SLURM of cluster.sh: two nodes with one CPU rank each."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from oblr_megatron.observe.status import Status, read_status
from tests.e2e.conftest import ROOT, environment
from tests.slurm.rewards import HELD_AFTER, HOLD, last_step

NODES = ("node-0", "node-1")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}
LIMIT_S = 1200.0  # of each wait; a loaded machine needs minutes for one start


def slurm(*command: str, tries: int = 5) -> str:
    """Output of a SLURM command. It may be repeated, because a busy controller may drop a connection."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode and tries > 1:
        time.sleep(2)
        return slurm(*command, tries=tries - 1)
    assert done.returncode == 0, (command, done.returncode, done.stderr)
    return done.stdout


@dataclass
class Job:
    """A job with its own directory. `arguments` follow the script; `options` are sbatch's, before the script."""

    directory: Path
    arguments: list[str]
    script: str = "slurm/oblr_qwen3_14b.sh"  # its header asks for two nodes
    options: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    holds: bool = False  # see `hold`
    id: str = ""

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def logs(self) -> Path:
        return next(self.log_parent.glob(f"*-{self.id}.logs"), self.log_parent / "absent")

    @property
    def log_parent(self) -> Path:
        return self.directory / "logs"

    @property
    def hold(self) -> Path:
        """While this file exists, `tests.slurm.rewards:held` holds the run."""
        return self.directory / "hold"

    def output(self) -> str:
        """The job's output file, of all attempts."""
        path = self.directory / "job.out"
        return path.read_text() if path.exists() else ""

    def log(self, name: str, attempt: int = 0) -> str:
        return (self.logs / f"attempt_{attempt}" / name).read_text()

    def status(self) -> Status:
        return read_status(self.run_dir)

    def submit(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        own = {
            "OBLR_CONFIG": str(ROOT / "examples/tiny_cpu/config.toml"),
            "OBLR_GPUS_PER_NODE": "0",
            "OBLR_RANKS_PER_NODE": "1",
            "OBLR_VENV": sys.prefix,
            "OBLR_LOGS": str(self.log_parent),
            "OBLR_PREFLIGHT_S": str(LIMIT_S),
            "OBLR_SERVERS_S": str(LIMIT_S),
            "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONPATH": str(ROOT),
            HOLD: str(self.hold),
        }
        if self.holds:
            self.hold.touch()
        command = ["sbatch", "--parsable", f"--output={self.directory / 'job.out'}", *self.options, self.script]
        done = subprocess.run(
            [*command, *self.arguments, f"run_dir={self.run_dir}"],
            cwd=ROOT,
            env=environment() | own | self.variables,
            check=True,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        self.id = done.stdout.strip().partition(";")[0]

    @contextmanager
    def submitted(self) -> Iterator[None]:
        """The job in the queue; after the block it is cancelled, and none of its processes may be left."""
        self.submit()
        try:
            yield
        finally:
            self.hold.unlink(missing_ok=True)
            slurm("scancel", self.id)
            self.wait_end()
        _, alive = psutil.wait_procs(self.processes(), timeout=LIMIT_S)
        assert not alive, [process.cmdline() for process in alive]

    def run(self) -> int:
        """Run the job to its end, requeues included; returns the script's exit status."""
        with self.submitted():
            return self.wait_end()

    def wait_end(self) -> int:
        """Wait until SLURM has ended the job; returns the script's exit status."""
        self.wait_for(lambda: self.state() in ENDED)
        return int(self.shown("ExitCode").partition(":")[0])

    def wait_held(self) -> None:
        """Wait until the reward holds the run in the step after HELD_AFTER, and status.json tells the step before."""
        self.wait_for(lambda: last_step(self.run_dir) == HELD_AFTER == self.status().step, alive=True)

    def wait_for(self, condition: Callable[[], bool], *, alive: bool = False) -> None:
        """Poll until the condition holds; with `alive`, the job must not end before."""
        until = time.monotonic() + LIMIT_S
        while not condition():
            assert not alive or self.state() not in ENDED, f"the job has ended: {self.output()[-5000:]}"
            assert time.monotonic() < until, f"{self.shown()}\n{self.output()[-5000:]}"
            time.sleep(0.2)

    def state(self) -> str:
        """SLURM's word for the job's state, as COMPLETED."""
        return self.shown("JobState")

    def shown(self, name: str = "") -> str:
        """A field of `scontrol show job`, of the first component; or all fields."""
        said = slurm("scontrol", "show", "job", self.id)
        if not name:
            return said
        found = re.search(rf"\b{name}=(\S*)", said)
        assert found is not None, said
        return found[1]

    def update(self, **fields: str) -> None:
        slurm("scontrol", "update", f"JobId={self.id}", *(f"{name}={value}" for name, value in fields.items()))

    def processes(self, module: str = "") -> list[psutil.Process]:
        """Living processes of the job; with the name of a module, those with this argument."""
        found = []
        for process in psutil.process_iter():
            try:
                variables, words = process.environ(), process.cmdline()
            except psutil.Error:  # the process has ended
                continue
            if variables.get("OBLR_LOGS") == str(self.log_parent) and (not module or module in words):
                found.append(process)
        return found
