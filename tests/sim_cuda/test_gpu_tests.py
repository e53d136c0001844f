"""The tests of tests/gpu pass on the simulated device, unchanged.

Not covered: vLLM, FP8, Transformer Engine (test_transformer_engine.py).
"""

from __future__ import annotations

from pathlib import Path

from tests.sim_cuda.launch import passed


def test_the_gpu_tests_pass(tmp_path: Path) -> None:
    assert passed(tmp_path / "report.xml") >= 7
