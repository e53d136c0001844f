"""The benchmark of gradient norms as a command on the smallest model, and its inputs.

Not covered: its times and peaks of memory, which have no oracle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from meter import Meter
from opacus_ghost import build_model
from rounds import paired_ratio
from shapes import SHAPES, VOCAB, Cell

BENCH = Path(__file__).resolve().parents[3] / "tools" / "bench"
COLUMNS = {"mode", "shape", "layers", "tokens", "samples", "seconds", "ratio_to_plain", "extra_bytes"}


def test_command_writes_a_row_for_every_mode(tmp_path: Path) -> None:
    """In its own process, because it joins a process group."""
    modes = ["two_pass", "stash", "bookkeep", "auto", "tempered", "tempered_logit", "opacus_ghost"]
    path = tmp_path / "figures" / "gradnorm.json"
    size = ["--shapes", "tiny", "--tokens", "8", "--samples", "2", "--layers", "1", "--steps", "2", "--threads", "1"]
    command = [sys.executable, str(BENCH / "gradnorm.py"), *size, "--json", str(path), "--modes"]
    subprocess.run([*command, *modes], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=240)
    record = json.loads(path.read_text())
    assert set(record) == {"machine", "date", "rows"}
    assert [row["mode"] for row in record["rows"]] == ["plain", *modes[:-1], "plain_torch", "opacus_ghost"]
    for row in record["rows"]:
        assert set(row) >= COLUMNS
        assert row["seconds"] > 0 and row["ratio_to_plain"] > 0 and row["steps"] == 2
    assert record["rows"][0]["ratio_to_plain"] == 1 and record["rows"][0]["extra_bytes"] == 0
    assert record["rows"][-1]["detail"] in ("one batch", "one by one")
    assert {row["detail"] for row in record["rows"][4:6]} <= {"two_pass", "stash", "bookkeep"}


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_the_model(shape: str) -> None:
    cell = Cell(shape, layers=3, tokens=8, samples=2)
    with torch.device("meta"):
        model = build_model(cell.hf_config(), torch.float32, torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == cell.parameters


def test_samples_have_the_length_asked_for_and_weights_that_count() -> None:
    """No advantage is 0: the step would leave out such a sample."""
    cell = Cell("tiny", layers=1, tokens=8, samples=5)
    samples = cell.random_samples()
    assert [len(sample.response_ids) for sample in samples] == [8] * 5
    assert {len(sample.prompt_ids) for sample in samples} == {16}
    assert all(0 <= token < VOCAB for sample in samples for token in sample.response_ids)
    norms = torch.linspace(1, 2, 5, dtype=torch.float64)
    for baseline in ("rloo", "optimal"):
        coefficients = cell.coefficients(cell.config(baseline, {}), norms)
        assert coefficients.shape == (5,) and coefficients.ne(0).all()


def test_ratio_is_of_each_round_and_then_the_median() -> None:
    """A machine that becomes twice as slow between rounds does not change the ratio."""
    assert paired_ratio([3.0, 6.2, 6.0], [2.0, 4.0, 4.0]) == 1.5


def test_peak_counts_what_a_step_holds_and_what_it_keeps() -> None:
    """64 MB made and written, 128 MB kept; the second step's peak does not include the first's."""
    meter = Meter(torch.device("cpu"))
    nothing = meter.peak(lambda: lambda: None)

    def make() -> object:
        kept = torch.ones(2**25)
        return lambda: torch.ones(2**24).sum() + kept[0]

    holding = meter.peak(make) - nothing
    assert 180e6 < holding < 240e6
    assert abs(meter.peak(lambda: lambda: None) - nothing) < 20e6
