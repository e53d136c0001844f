"""FP8 copies of Qwen2 and Llama: matrices are quantised, biases stay bf16, and names are those of the source.

A process of its own, because modelopt's import registers hooks. Not covered: the command (test_quantize.py), vLLM.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import LIMIT_S, ROOT, environment
from tests.tiny import make_hf_dir

PROCESS = """
import sys
from pathlib import Path
import torch
from oblr_megatron.quantize import fp8
from oblr_megatron.quantize.calibration import pack
for source in map(Path, sys.argv[1:]):
    target = source.with_suffix(".fp8")
    model = fp8.load_model(source, torch.device("cpu"))
    fp8.calibrate(model, pack([tuple(range(2, 30)), (5, 9, 3)]))
    target.mkdir()
    fp8.check_written(target, fp8.write(model, source, target))
"""
FAMILIES = ("qwen2", "llama")
MATRICES = 7  # of a layer


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with FAMILY and FAMILY.fp8."""
    root = tmp_path_factory.mktemp("families")
    sources = [str(make_hf_dir(root / family, family=family)) for family in FAMILIES]
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, *sources],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_are_quantised_and_biases_are_not(family: str, copies: Path) -> None:
    before, after = (load_file(copies / name / "model.safetensors") for name in (family, f"{family}.fp8"))
    assert {name for name in after if not name.endswith("_scale")} == before.keys()
    stored = {name for name, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn}
    assert stored == {name for name in before if name.endswith("_proj.weight")} and len(stored) == 2 * MATRICES
    biases = {name for name in before if name.endswith("bias")}
    assert len(biases) == (2 * 3 if family == "qwen2" else 0)
    for name in before.keys() - stored:
        assert torch.equal(after[name], before[name].bfloat16()), name
    for name in stored:
        exact = before[name].bfloat16().float() / after[name.replace("weight", "weight_scale")]
        assert torch.allclose(after[name].float(), exact, rtol=1 / 16, atol=2**-9), name
