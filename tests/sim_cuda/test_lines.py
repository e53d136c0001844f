"""`make gpu-test` on the simulated device, line by line: every bound is met, or only real hardware can answer it.

So that the time on a real GPU goes into answers: the lines run to their end, report every figure, and their code for
CUDA works. Operations on large tensors are not computed in lines that only count bytes and launches.

Not covered: the lines that lack something here (Transformer Engine, vLLM for GPUs, nvidia-smi, eight cores).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim_cuda.launch import run
from tools.gpu_test.lines import LINES
from tools.gpu_test.results import load

pytestmark = [pytest.mark.nightly]
LIMIT = {"SIM_CUDA_LIMIT": "1000000"}
SPEED = "seconds of this device are the host's"
RUN: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "0": ({}, {"problems": "no vLLM for GPUs here"}),
    "1": ({}, {}),
    "2": (LIMIT, {"step / plain*": SPEED}),
    "2b": (LIMIT, {}),
    "2c": ({}, {"*": SPEED}),
    "3": (LIMIT, {}),
    "5": ({}, {"GB/s*": SPEED}),
    "6": (LIMIT, {"*": SPEED}),
    "6c": (LIMIT, {"seconds*": SPEED}),
    "7b": ({}, {}),
}
"""Environment of a line, and its bounds that only hardware can meet with the reason."""
LACKING = {
    "3b": "nvidia-smi",
    "4": "Transformer Engine",
    "4b": "Transformer Engine",
    "4c": "Transformer Engine",
    "4d": "Transformer Engine",
    "6b": "Transformer Engine",
    "7": "nvidia-smi",
    "7c": "8 cores",
    "8": "vLLM",
    "8b": "vLLM",
}


@pytest.mark.parametrize("name", RUN)
def test_a_line_ends_with_every_figure(tmp_path: Path, name: str) -> None:
    environ, hardware = RUN[name]
    done = run(["-m", "tools.gpu_test", "--lines", name, "--out", str(tmp_path)], **environ)
    outcome = load(tmp_path / "gpu.json")[name]
    print(outcome.verdict, outcome.why, outcome.figures, sep="\n    ")
    assert outcome.verdict in ("ok", "not met"), f"{outcome.why}\n{done.stdout[-500:]}"
    line = LINES[name]
    unmet = {bound.pattern for bound in line.bounds if bound.broken(outcome.figures)}
    assert unmet <= hardware.keys()


def test_no_line_is_left_out() -> None:
    assert RUN.keys() | LACKING.keys() == LINES.keys()
