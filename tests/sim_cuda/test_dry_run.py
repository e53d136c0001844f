"""The first step of every job on GPU nodes: dry runs of presets, with models of all ranks on meta devices.

With Transformer Engine where `make test-sim` has fetched it. Not covered: a driver.
"""

from __future__ import annotations

import json

import pytest

from oblr_megatron.model.published import published
from oblr_megatron.observe.performance.flops import total_parameters
from tests.sim_cuda.launch import TRANSFORMER_ENGINE, run

PRESETS = {"qwen3_0.6b": "Qwen3-0.6B", "qwen3_8b": "Qwen3-8B", "qwen3_30b_a3b": "Qwen3-30B-A3B"}
"""Tied (nightly); dense, with TP and PP; a mixture."""
CODE = """
import sys, torch
from oblr_megatron.cli import main
for name in sys.argv[1:]:
    status = main(["train", f"slurm/configs/{name}.toml", "--dry-run", "--nnodes", "2", "--nproc-per-node", "8"])
    print("status", status, torch.cuda.is_available(), torch.cuda.current_device(), flush=True)
"""


@pytest.mark.parametrize(
    "names", [list(PRESETS)[1:], pytest.param(list(PRESETS)[:1], marks=pytest.mark.nightly)], ids=" ".join
)
def test_presets_pass_and_leave_the_gpus_as_they_were(names: list[str]) -> None:
    engine = {"SIM_CUDA_TE": str(TRANSFORMER_ENGINE)} if TRANSFORMER_ENGINE.is_dir() else {}
    done = run(["-c", CODE, *names], **engine)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("status")] == ["status 0 True 0"] * len(names), done.stderr
    assert all(f"{total_parameters(published(PRESETS[name])):,} parameters" in done.stdout for name in names)
    tables = [json.loads(line) for line in lines if line.startswith("{")]
    assert [table["world_size"] for table in tables] == [16] * len(names)
