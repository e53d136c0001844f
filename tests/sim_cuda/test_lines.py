"""`make gpu-test` on the simulated device, line by line: every bound is met, or only real hardware can answer it.

So that the time on a real GPU goes into answers: the lines run to their end, report every figure, and their code for
CUDA works. Some run at their own sizes without computing, others with the sizes of a rehearsal.

Not covered: the lines that lack something here (vLLM for GPUs, nvidia-smi, eight cores).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim_cuda.launch import TRANSFORMER_ENGINE, run
from tools.gpu_test.lines import LINES
from tools.gpu_test.results import REHEARSED, load

pytestmark = [pytest.mark.nightly]
SHAPES = {"SIM_CUDA_LIMIT": "1000000"}
ENGINE = {"SIM_CUDA_TE": str(TRANSFORMER_ENGINE)}
TINY: dict[str, str] = {"ARGS": "--rehearse"}
HARDWARE = ("*",)  # the line asks for times only
RUN: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "0": ({}, ("problems",)),  # vLLM here is that for CPUs
    "1": ({}, ()),
    "2": (SHAPES, HARDWARE),
    "2b": (SHAPES, ()),
    "2c": (SHAPES, HARDWARE),
    "3": (SHAPES, ()),
    "4": (ENGINE, ("tests failed",)),  # FP8
    "4b": (ENGINE | TINY, HARDWARE),
    "4c": (ENGINE | TINY, HARDWARE),
    "5": (TINY, ("GB/s without checksums",)),
    "6": (TINY, HARDWARE),
    "6b": (ENGINE | TINY, HARDWARE),
    "6c": (TINY, HARDWARE),
    "7b": (SHAPES, ()),
}
"""Environment of a line, at its own sizes or tiny, and its bounds that only a real GPU can meet."""
NOT_RUN = {
    "3b": "nvidia-smi",
    "4d": "seconds of kernels",
    "7": "nvidia-smi",
    "7c": "8 cores",
    "8": "vLLM for GPUs",
    "8b": "vLLM for GPUs",
}


@pytest.mark.parametrize("name", RUN)
def test_a_line_ends_with_every_figure(tmp_path: Path, name: str) -> None:
    environ, hardware = RUN[name]
    if "SIM_CUDA_TE" in environ and not TRANSFORMER_ENGINE.is_dir():
        pytest.skip("needs Transformer Engine's wheel (make test-sim)")
    options = [environ["ARGS"]] if "ARGS" in environ else []
    done = run(["-m", "tools.gpu_test", "--lines", name, "--out", str(tmp_path), *options], **environ)
    outcome = load(tmp_path / "gpu.json")[name]
    print(f"line {name}: {outcome.verdict} {outcome.why}", *outcome.figures.items(), sep="\n    ")
    assert outcome.verdict in ("ok", "not met", REHEARSED), f"{outcome.why}\n{done.stdout[-500:]}"
    for bound in LINES[name].bounds:
        longer = outcome.verdict == REHEARSED and "8192 tokens" in bound.pattern  # than a rehearsal's sequences
        assert bound.optional or longer or bound.found(outcome.figures), bound.pattern
        assert hardware == HARDWARE or bound.pattern in hardware or not bound.broken(outcome.figures), bound.pattern


def test_no_line_is_left_out() -> None:
    assert RUN.keys() | NOT_RUN.keys() == LINES.keys()
