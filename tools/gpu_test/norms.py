"""Per-sample norms: the tests of tests/gpu, cost against a plain step, waits for the device, memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.config import ParallelConfig
from oblr_megatron.model.parallel import initialize
from oblr_megatron.preflight.doctor import examine
from tools.gpu_test.report import ROOT, Report

BENCH = ROOT / "tools" / "bench"
WAITS = {
    "cuda": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "cpu": ("aten::_local_scalar_dense",),  # where a GPU would be waited for
}


def machine(report: Report) -> None:
    """Everything that `oblr-megatron doctor` finds, and the tools that packages for GPUs are built with."""
    found = examine()
    report.put("problems", len(found.problems))
    for number, problem in enumerate(found.problems):
        report.put(f"problem {number}", problem)
    for name, version in {**found.packages, **found.platform}.items():
        report.put(name, version or "none")
    for number, gpu in enumerate(found.gpus):
        report.put(f"GPU {number}", f"{gpu.name}, {gpu.capability}, {gpu.memory_gib} GiB")
    for command in (["gcc", "--version"], ["nvcc", "--version"], ["cmake", "--version"], ["nvidia-smi"]):
        report.put(command[0], _version(command))


def _version(command: Sequence[str]) -> str:
    """Print what a command says, for the log; its first line with a version."""
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none ({type(error).__name__})"
    print(text)
    return next((line.strip("| ") for line in text.splitlines() if re.search(r"\d\.\d", line)), "found")


class Recorder:
    """Plugin of pytest: reports counts, and the largest value of each property that tests record."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._counts = {"passed": 0, "failed": 0, "skipped": 0}
        self._worst: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called after setup, call and teardown of a test; setup and teardown count only if they did not pass."""
        if report.when != "call" and report.outcome == "passed":
            return
        self._counts[report.outcome] += 1
        self._report.put(f"tests {report.outcome}", self._counts[report.outcome])
        if report.failed:
            self._report.put(
                f"failed: {report.nodeid.rpartition('::')[2]}", str(report.longrepr).splitlines()[-1][:200]
            )
        for name, value in report.user_properties:
            self._worst[name] = max(value, self._worst.get(name, value))
            self._report.put(f"largest {name}", self._worst[name])


def tests(report: Report, paths: Sequence[str], select: str = "") -> None:
    """Run tests in this process."""
    report.put("tests failed", 0)
    options = ["-rs", "-s", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *(["-k", select] if select else [])]
    pytest.main([*options, *(str(ROOT / path) for path in paths)], plugins=[Recorder(report)])


def ratios(
    report: Report,
    shapes: Sequence[str] = ("qwen3-0.6b", "qwen3-8b"),
    tokens: Sequence[int] = (512, 2048, 8192),
    layers_of: str = "local",
    more: Sequence[str] = ("--dtype", "bfloat16", "--minutes", "0.4"),
) -> None:
    """tools/bench/gradnorm.py, one process for each shape and length."""
    for shape in shapes:
        for length in tokens:
            row_of = ["--shapes", shape, "--tokens", str(length), "--layers-of", layers_of]
            command = ["gradnorm.py", *row_of, "--modes", "inline", "two_pass", "stash", "bookkeep", *more]
            for row in rows_of(command):
                where = f"{row['mode']}, {shape}, {length} tokens"
                report.put(f"seconds, {where}", row["seconds"])
                if row["mode"] != "plain":
                    report.put(f"step / plain, {where}", row["ratio_to_plain"])
                    report.put(f"GB over plain, {where}", row["extra_bytes"] / 1e9)


def memory(report: Report, cases: Sequence[str]) -> None:
    """tools/bench/memory.py: the estimate of a run's start against the measured peak."""
    for case in cases:
        row = rows_of(["memory.py", "--cases", case])[0]
        report.put(f"measured GB, {case}", row["measured"] / 1e9)
        report.put(f"estimate / measured, {case}", row["ratio"])


def rows_of(command: Sequence[str]) -> list[dict[str, Any]]:
    """The rows that a benchmark writes."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "rows.json"
        script, *options = command
        subprocess.run([sys.executable, str(BENCH / script), *options, "--json", str(out)], cwd=ROOT, check=True)
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    return rows


def waits(
    report: Report, shape: str = "qwen3-0.6b", tokens: int = 2048, layers: int = 4, dtype: str = "bfloat16"
) -> None:
    """How often the host waits for the device in a step of `bookkeep`, beyond a plain step."""
    from operators import operators_of
    from shapes import Cell
    from steps import build_candidates

    parallel = initialize(ParallelConfig())
    cell = Cell(shape, layers, tokens, 4, dtype, "local")
    found: dict[str, int] = {}
    for candidate in build_candidates(cell, ["bookkeep"], parallel):
        step = candidate.make()
        step()  # compiles, allocates
        operators = operators_of(step, parallel.device)
        found[candidate.mode] = sum(one.calls for one in operators if one.name in WAITS[parallel.device.type])
        report.put(f"waits, {candidate.mode}", found[candidate.mode])
    added = found["bookkeep"] - found["plain"]
    report.put("waits that bookkeep adds, per layer and sample", added / (cell.layers * cell.samples))
