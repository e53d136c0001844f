"""Whole runs under model.batch_invariant: the log-probs of trainer and engine are equal to the bit, in every step.

Real megatron-core and real vLLM on a CPU. Not covered: GPUs; Llama's scaled rotary embedding in an engine (its table:
tests/unit/test_invariant.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import records
from tests.e2e.forked import forked

STEPS = 3
PACKED = {"parallel__packing": "packed", "parallel__micro_batch_tokens": 64}
LAYOUTS = {
    "one rank, packed, float32": (1, PACKED),
    "two stages, rows, bfloat16": (
        2,
        {"parallel__pipeline_model_parallel_size": 2, "model__dtype": "bfloat16"},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_has_no_mismatch(tmp_path: Path, overrides: Callable[..., list[str]], name: str) -> None:
    """Weights change and are pushed after every step. Exact norms weigh the baseline as ever."""
    ranks, layout = LAYOUTS[name]
    keys = {"num_steps": STEPS, "model__batch_invariant": "true", "algo__baseline": "optimal", "seed": 5}
    result = forked(ranks, overrides(tmp_path / "run", **keys, **layout))
    assert result.returncode == 0, result.stderr[-3000:]
    steps = records(tmp_path / "run")
    assert [step["rollout/logprob_abs_diff"] for step in steps] == [0.0] * STEPS
    assert all(step["grad_norm"] > 0 and step["gradnorm/sq_mean"] > 0 for step in steps)
    assert [step["weights/version"] for step in steps] == list(range(1, STEPS + 1))


def test_a_difference_ends_the_run(tmp_path: Path, overrides: Callable[..., list[str]], saved: Path) -> None:
    """Samples of an engine without the mode differ in the last bits, and the first step says so."""
    keys = overrides(tmp_path / "run", num_steps=3, model__batch_invariant="true")
    result = forked(1, [*keys, "--replay", str(saved / "rollouts")])
    assert result.returncode == 1
    (error,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert "step 1" in error and "model.batch_invariant" in error
    assert not (tmp_path / "run" / "checkpoints").exists()
