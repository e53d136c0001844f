"""Whole runs by replay on the simulated device agree with the same runs on the CPU.

The command, its ranks, the step loop, checkpoints and the backend called nccl run as on GPUs, in fp32. In bf16 the
device and the CPU round differently: a metric that is a small difference of large numbers differs by a tenth.

Not covered: engines and pushes, Transformer Engine, real NCCL.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sim_cuda.launch import ROOT, environment
from tools.gpu_test.runs import MODES, prepare

CASES: dict[str, tuple[int, str, list[str]]] = {
    "tensor": (2, "inline", ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]),
    "pipeline": (2, "stash", ["parallel.pipeline_model_parallel_size=2"]),
    "context": (2, "two_pass", ["parallel.context_parallel_size=2"]),
    "data": (2, "bookkeep", ["parallel.use_distributed_optimizer=true", "optimizer.offload=sampling"]),
    "packed": (1, "bookkeep", ["parallel.packing=packed", "parallel.micro_batch_tokens=200"]),
    "penalty": (1, "two_pass", ["algo.kl_coefficient=0.01", "parallel.micro_batch_tokens=200"]),
}
CLOSE = 2e-3  # of a metric, or of 1e-3 if it is smaller
BY_NAME = ("timing", "perf", "time", "memory")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a run on saved samples and a tiny model, both in one directory."""
    sizes = {"prompts": 4, "group": 2, "tokens": 40, "steps": 2}
    more = ("model.transformer_impl=local", "checkpoint.every_steps=2")
    return prepare(tmp_path_factory.mktemp("run"), tiny=True, dtype="float32", **sizes, more=more)


def close(found: float, wanted: float) -> bool:
    """Whether a metric agrees; NaN with NaN."""
    return (math.isnan(found) and math.isnan(wanted)) or abs(found - wanted) <= CLOSE * max(abs(wanted), 1e-3)


def metrics(arguments: list[str], run_dir: Path, ranks: int, env: dict[str, str]) -> list[dict[str, Any]]:
    """The numbers of each step."""
    command = [sys.executable, "-m", "oblr_megatron.cli", "train", *arguments, f"run_dir={run_dir}"]
    command += ["--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if isinstance(v, (int, float)) and not k.startswith(BY_NAME)} for row in rows]


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_a_run_agrees_with_that_on_a_cpu(arguments: list[str], tmp_path: Path, case: str) -> None:
    ranks, mode, options = CASES[case]
    run = [*arguments, *MODES[mode], *options]
    made = metrics(run, tmp_path / "device", ranks, environment())
    wanted = metrics(run, tmp_path / "cpu", ranks, dict(os.environ))
    assert len(made) == len(wanted) == 2
    for own, other in zip(made, wanted, strict=True):
        assert own.keys() == other.keys()
        assert not {name: (own[name], other[name]) for name in own if not close(own[name], other[name])}
