"""Conversions on a machine with GPUs: they use none. Not covered: a driver."""

from __future__ import annotations

from pathlib import Path

from tests.sim_cuda.launch import run
from tests.tiny import make_hf_dir, make_moe_hf_dir

CODE = """
import sys, torch
from oblr_megatron.cli import main
for hf in sys.argv[1:]:
    for words in (["to-megatron", hf, f"{hf}-megatron", "--check"], ["to-hf", f"{hf}-megatron", f"{hf}-again"]):
        print("status", main(["convert", *words]), torch.cuda.is_available(), torch.cuda.memory_allocated(), flush=True)
"""


def test_conversions_use_no_gpu(tmp_path: Path) -> None:
    """Of a dense model and of a mixture."""
    made = make_hf_dir(tmp_path / "dense"), make_moe_hf_dir(tmp_path / "mixture")
    done = run(["-c", CODE, *map(str, made)])
    lines = [line for line in done.stdout.splitlines() if line.startswith("status")]
    assert lines == ["status 0 True 0"] * 4, done.stdout[-2000:] + done.stderr[-4000:]
