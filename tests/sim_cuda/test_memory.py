"""The estimate of a step's memory against the peak of the simulated device, at the real sizes of models.

Operations on large tensors are not computed, so that a step of an 8B model takes seconds; what is allocated is real.
The device rounds as CUDA's allocator does.

Not covered: fragmentation, workspaces of libraries, Transformer Engine, pipeline stages.
"""

from __future__ import annotations

import json

import pytest

from tests.sim_cuda.launch import run

LIMIT = "1000000"
FULL = "layers=28 vocabulary=151936 tied=1 tokens=2048 dtype=bfloat16 layers_of=local"


def measured(case: str) -> float:
    """Estimate / measured of tools/bench/memory.py."""
    done = run(["tools/bench/memory.py", "--rank-of", case], SIM_CUDA_LIMIT=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    row = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    print(f"{case}: {row['estimated'] / 1e9:.3f} GB estimated, {row['measured'] / 1e9:.3f} measured")
    return float(row["ratio"])


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["inline", "two_pass", "stash", "bookkeep"])
def test_the_estimate_is_the_peak(mode: str) -> None:
    assert measured(f"{mode} layers=2 tokens=2048 vocabulary=65536 tied=1 dtype=bfloat16 layers_of=local") == (
        pytest.approx(1, abs=0.01)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["inline", "two_pass", "stash", "bookkeep"])
def test_the_estimate_is_the_peak_of_qwen3_0_6b(mode: str) -> None:
    assert 0.99 <= measured(f"{mode} {FULL}") <= 1.03


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [["8", "1"], ["4", "2"]])
def test_the_estimate_is_the_peak_of_a_rank_of_qwen3_8b(layout: list[str]) -> None:
    """TP8, and TP4 x CP2. Flash attention needs no masks under context parallelism."""
    done = run(["-m", "tests.sim_cuda.one_rank", *layout], SIM_CUDA_LIMIT=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    ratios = json.loads(done.stdout.splitlines()[-1])
    print(layout, ratios)
    assert 0.99 <= ratios["peak"] <= 1.03
    assert ratios["between steps"] == pytest.approx(1, abs=0.01)
    assert ratios["other devices"] == 0
