"""The command lines of `plan`, `quantize` and `study`: mistakes end before torch is imported.

tests/unit/test_cli.py checks that their options have help.
"""

from __future__ import annotations

from pathlib import Path

from tests.unit.test_cli import end_in_one_line

MISTAKES: dict[str, tuple[list[str], str]] = {
    "plan without a length": (["plan", "--model", "Qwen3-8B", "--gpus", "8"], "--sequence-length 8192"),
    "plan without GPUs": (["plan", "--model", "Qwen3-8B", "--gpus", "0"], "--gpus"),
    "plan of no model": (["plan", "--model", "none", "--gpus", "8", "--sequence-length", "64"], "none"),
    "quantize without rows": (["quantize", "model", "fp8"], "--calibration"),
    "quantize to no format": (["quantize", "model", "fp8", "--format", "fp3"], "fp3"),
    "quantize of no model": (["quantize", "none", "fp8", "--calibration", "rows.jsonl"], "none"),
    "no study": (["study", "none"], "none"),
}


def test_mistakes_end_in_one_line_before_torch_is_imported(tmp_path: Path) -> None:
    end_in_one_line(MISTAKES, tmp_path)
