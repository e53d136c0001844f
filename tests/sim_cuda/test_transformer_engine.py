"""Transformer Engine's own Python on the simulated device: its layers give the norms of the gradient.

`make test-sim` unpacks its wheel, which has no compiled code; torch operations stand in for its C++ module.

Not covered: its kernels, FP8, its memory, context parallelism.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim_cuda.launch import TRANSFORMER_ENGINE, passed

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not TRANSFORMER_ENGINE.is_dir(), reason="needs Transformer Engine's wheel (make test-sim)"),
]


def test_the_gpu_tests_pass(tmp_path: Path) -> None:
    assert passed(tmp_path / "report.xml", SIM_CUDA_TE=str(TRANSFORMER_ENGINE)) >= 18
