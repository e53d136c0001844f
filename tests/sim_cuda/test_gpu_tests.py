"""The tests of tests/gpu pass on the simulated device, unchanged. Those without an assertion on its memory run nightly.

Not covered: vLLM, FP8, Transformer Engine (test_transformer_engine.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim_cuda.launch import passed

MEMORY = "stash_buffers or memory_is_freed"


@pytest.mark.parametrize(
    ("chosen", "number"), [(MEMORY, 4), pytest.param(f"not ({MEMORY})", 5, marks=pytest.mark.nightly)]
)
def test_the_gpu_tests_pass(tmp_path: Path, chosen: str, number: int) -> None:
    assert passed(tmp_path / "report.xml", chosen) >= number
