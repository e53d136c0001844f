"""Files of tests/distributed with real ranks, each on a simulated GPU of its own, unchanged.

In fp64, against one rank: interleaved pipelines and context parallelism. Saves in the background, also those that fail.

Not covered: experts, which need Transformer Engine's layers on a GPU (test_transformer_engine.py); the other files.
"""

from __future__ import annotations

import pytest

from tests.sim_cuda.launch import run

FILES = ("interleaved", "context_parallel", "saver")


@pytest.mark.nightly
@pytest.mark.parametrize("name", FILES)
def test_the_tests_of_ranks_pass(name: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-m", "not nightly"]
    done = run(["-m", "pytest", f"tests/distributed/test_{name}.py", *options])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
