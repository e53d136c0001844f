"""Transformer Engine's own Python on the simulated device: norms of its layers, and the state of its Adam.

`make test-sim` unpacks its wheel, which has no compiled code; torch operations stand in for its C++ module.

Not covered: its kernels, FP8, its memory, context parallelism.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu.test_gradnorm_gpu import OF_THE_GRADIENT, VOCAB
from tests.sim_cuda.launch import TRANSFORMER_ENGINE, passed, run
from tests.tiny import make_hf_dir, make_moe_hf_dir

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not TRANSFORMER_ENGINE.is_dir(), reason="needs Transformer Engine's wheel (make test-sim)"),
]
ENVIRONMENT = {"SIM_CUDA_TE": str(TRANSFORMER_ENGINE)}
SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64, "num_experts": 8}


def test_the_gpu_tests_pass(tmp_path: Path) -> None:
    assert passed(tmp_path / "report.xml", **ENVIRONMENT) >= 18


def norms(path: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Of each mode [N]."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = run([*launcher, "-m", "tests.sim_cuda.experts", str(path)], **ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return {mode: torch.tensor(values, dtype=torch.float64) for mode, values in found.items()}


def test_norms_of_a_mixture(tmp_path: Path) -> None:
    """On one rank, and with the experts shared by two."""
    path = make_moe_hf_dir(tmp_path / "model", vocab_size=VOCAB, max_position_embeddings=1024, **SIZES)
    one, two = norms(path, 1), norms(path, 2)
    gradient = one.pop("gradient")
    for mode, found in one.items():
        torch.testing.assert_close(found, gradient, rtol=OF_THE_GRADIENT, atol=0)
        torch.testing.assert_close(two[mode], found, rtol=OF_THE_GRADIENT, atol=0)


def test_adams_state_crosses_to_torch_and_back(tmp_path: Path) -> None:
    """With the plain and the distributed optimizer, in fp32 and with masters: the next step is the same."""
    path = make_hf_dir(tmp_path / "model", tied=True)
    done = run(["-m", "tests.sim_cuda.adam", str(path), str(tmp_path)], **ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert len(found) == 8
    for case, apart in found.items():
        assert apart < (1e-4 if "float32" in case else 2.0**-6), case
