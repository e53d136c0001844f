"""Examines one node: GPUs, disks, ports, model directory, data sources and versions."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

import oblr_megatron
from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.checks.layout import check_port
from oblr_megatron.checks.machine import compiler_problem, driver_problem
from oblr_megatron.checks.packages import installed, problems
from oblr_megatron.config import Config, load_config
from oblr_megatron.data.sources import open_source, sources_of
from oblr_megatron.errors import Problem, UserError
from oblr_megatron.formatting import size
from oblr_megatron.preflight.checklist import check_room

T = TypeVar("T")

IDLE_BYTES = 2 * 2**30  # GPU memory that drivers and monitors may use
MIN_SCRATCH_BYTES = 2**30  # for NCCL's and engines' shared memory (/dev/shm) and compiled kernels (TMPDIR)
QUERY = ("driver_version", "memory.used", "memory.total", "compute_cap", "name")  # the name may contain commas
SMI_S = 60.0
FILES_PER_RANK, OTHER_FILES = 4, 512
"""Open files of a process: three groups of gloo hold a connection to each rank, and the first node's stores too."""


@dataclass(slots=True)
class NodeReport:
    """The findings of one node.

    Example: NodeReport(node="gpu-07", facts={"GPUs": "8 x NVIDIA H100 80GB HBM3", "run_dir": "1.2 TiB", ...},
                    same={"torch": "2.13.0", "driver": "570.86.15", "code": "5b0c1e...", ...}, problems=[])
    """

    node: str
    facts: dict[str, str] = field(default_factory=dict)  # columns of the table
    same: dict[str, str] = field(default_factory=dict)  # must be equal on all nodes
    problems: list[Problem] = field(default_factory=list)

    def add(self, what: str, fix: str) -> None:
        """Add a problem and its fix."""
        self.problems.append((what, fix))

    @classmethod
    def load(cls, text: str) -> NodeReport:
        """The report from the JSON of its fields."""
        content = json.loads(text)
        return cls(**content | {"problems": [(what, fix) for what, fix in content["problems"]]})


def examine(
    node: str, config_file: Path, overrides: list[str], *, expect_gpus: int, ports: tuple[int, ...]
) -> NodeReport:
    """Examine this node; problems are reported, not raised.

    Args:
        node: its name.
        config_file: of the run.
        overrides: section.key=value strings.
        expect_gpus: number of GPUs the node must have; 0 for CPU ranks.
        ports: must be free on this node.
    """
    report = NodeReport(node)
    report.same |= versions()
    for line in problems():
        report.add(line, "install the versions in requirements/")
    report.same["config"] = _digest([config_file]) if config_file.is_file() else "absent"
    _examine_gpus(report, expect_gpus)
    _examine_scratch(report)
    for port in ports:
        _noting(report, partial(check_port, port))
    config = _noting(report, partial(load_config, config_file, overrides))
    if config is not None:
        _noting(report, partial(_examine_model, report, config))
        for source, training in sources_of(config):
            _noting(report, partial(next, open_source(source, training=training), None))
    return report


def versions() -> dict[str, str]:
    """Versions that must be equal on all nodes: packages, Python, NCCL and this package's code."""
    by_name = {name: version or "none" for name, version in installed().items()}
    by_name["python"] = ".".join(map(str, sys.version_info[:3]))
    root = Path(oblr_megatron.__file__).resolve().parent
    by_name["code"] = _digest(sorted(root.rglob("*.py")), root)
    if torch.cuda.is_available():
        by_name["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return by_name


def _examine_gpus(report: NodeReport, expected: int) -> None:
    """Check that nvidia-smi and torch see the expected number of GPUs, and that they are idle."""
    from oblr_megatron.model.precision import usable_gpus

    if expected == 0:
        report.facts["GPUs"] = "CPU"
        return
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # without ConstrainDevices nvidia-smi sees other jobs' GPUs
    chosen = [f"--id={own}"] if own and "MIG" not in own else []
    listed = _said(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", *chosen])
    if listed is None:
        report.add("nvidia-smi does not answer", "check the driver, or give the container the GPUs (utility)")
        return
    rows = [[value.strip() for value in line.split(",", len(QUERY) - 1)] for line in listed.splitlines()]
    seen = usable_gpus()
    report.facts["GPUs"] = f"{seen} x {rows[0][4]}" if rows else "none"
    # some GPUs say [N/A]: those that share the memory of the processor
    used = {index: (int(row[1]), int(row[2])) for index, row in enumerate(rows) if (row[1] + row[2]).isdecimal()}
    report.facts["GPU free"] = size(min(total - taken for taken, total in used.values()) * 2**20) if used else "unknown"
    report.same |= {
        name: ", ".join(sorted({row[column] for row in rows}))
        for name, column in (("driver", 0), ("compute capability", 3), ("GPU kind", 4), ("GPU memory, MiB", 2))
    }
    if seen != expected:
        fault = driver_problem(rows[0][0], torch.version.cuda) if rows and not seen else None
        report.add(*fault or (f"torch sees {seen} GPUs, not {expected}", "drain the node, or set OBLR_GPUS_PER_NODE"))
    if compiler := compiler_problem():
        report.add(*compiler)
    busy = [f"GPU {index}: {taken} MiB" for index, (taken, _) in used.items() if taken * 2**20 > IDLE_BYTES]
    if busy:
        report.add(f"GPUs are in use ({', '.join(busy)})", "end the processes on them, or drain the node")


def _examine_scratch(report: NodeReport) -> None:
    """Check free space in shared memory and in the temporary directory."""
    for name, path in {"/dev/shm": "/dev/shm", "TMPDIR": tempfile.gettempdir()}.items():
        free = shutil.disk_usage(path).free
        report.facts[name] = size(free)
        if free < MIN_SCRATCH_BYTES:
            what = f"{path} has {size(free)} free, {size(MIN_SCRATCH_BYTES)} are needed"
            report.add(what, f"free space in {path}")


def check_open_files(report: NodeReport, ranks: int) -> None:
    """Check that a process of this node may open its connections to all ranks of the run."""
    hard, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], FILES_PER_RANK * ranks + OTHER_FILES
    if hard < needed and hard != resource.RLIM_INFINITY:
        what = f"a process may open {hard} files, and {ranks} ranks need {needed}"
        report.add(what, "raise the hard limit: LimitNOFILE of slurmd, or nofile in /etc/security/limits.conf")


def _examine_model(report: NodeReport, config: Config) -> None:
    """Check the model directory, and that run_dir is writable with room for a checkpoint.

    Raises:
        UserError: the first problem.
    """
    there = next(path for path in (config.run_dir, *config.run_dir.absolute().parents) if path.exists())
    report.facts["run_dir"] = size(shutil.disk_usage(there).free)
    if not os.access(there, os.W_OK):
        raise UserError("run_dir is not writable", where=str(there), fix="choose a run_dir that you can write to")
    model = check_hf_dir(config.model.path)
    unreadable = [name for name in model.weight_files if not os.access(model.path / name, os.R_OK)]
    if unreadable:
        raise UserError(f"cannot read {unreadable[0]}", where=str(model.path), fix="make the files readable")
    report.same["model"] = f"{_digest([model.path / 'config.json'])}, {model.num_bytes} bytes"
    check_room(config, model)


def _noting(report: NodeReport, check: Callable[[], T]) -> T | None:
    """The check's result; a UserError becomes a problem of the node."""
    try:
        return check()
    except UserError as error:
        report.add(f"{error.what}{f' [{error.where}]' if error.where else ''}", error.fix)
        return None


def _digest(files: list[Path], root: Path = Path()) -> str:
    """Short hash of the files' names relative to `root` and their contents."""
    total = hashlib.sha256()
    for file in files:
        name = file.relative_to(root) if root != Path() else file.name
        total.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def _said(command: list[str]) -> str | None:
    """Standard output of a command; None if it fails or takes longer than SMI_S."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
