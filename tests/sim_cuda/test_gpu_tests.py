"""The tests of tests/gpu pass on the simulated device, unchanged.

Not covered: vLLM, FP8; without its package Transformer Engine.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from tests.sim_cuda.launch import run


def test_the_gpu_tests_pass(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-k", "not sleep and not fp8", f"--junitxml={report}"]
    done = run(["-m", "pytest", "tests/gpu", *options])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    suite = ElementTree.parse(report).getroot()[0].attrib
    assert int(suite["tests"]) - int(suite["skipped"]) >= 7
