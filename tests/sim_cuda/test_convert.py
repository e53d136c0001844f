"""Conversions on a machine with GPUs: they use none. Not covered: a driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim_cuda.launch import run
from tests.tiny import make_hf_dir, make_moe_hf_dir

CODE = """
import sys, torch
from oblr_megatron.cli import main
hf, made = sys.argv[1:]
for words in (["to-megatron", hf, made, "--check"], ["to-hf", made, f"{made}-hf"]):
    print("status", main(["convert", *words]), torch.cuda.is_available(), torch.cuda.memory_allocated(), flush=True)
"""


@pytest.mark.parametrize("make", [make_hf_dir, make_moe_hf_dir], ids=["dense", "mixture"])
def test_conversions_use_no_gpu(make: object, tmp_path: Path) -> None:
    assert callable(make)
    done = run(["-c", CODE, str(make(tmp_path / "model")), str(tmp_path / "megatron")])
    lines = [line for line in done.stdout.splitlines() if line.startswith("status")]
    assert lines == ["status 0 True 0"] * 2, done.stdout[-2000:] + done.stderr[-4000:]
