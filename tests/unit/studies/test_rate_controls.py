"""The control schedules: an earlier run's rates shuffled or smoothed, and the refusal of invalid sources."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.errors import UserError
from studies.rate_controls import control_rates, matched_decay, shuffled

RATES = [0.1, 0.2, 0.3, 0.31, 0.24, 0.2, 0.17, 0.11, 0.1, 0.06]
WARMUP = 2


def write_source(run_dir: Path, rates: list[Any] = RATES, **algo: Any) -> Path:
    run_dir.mkdir(exist_ok=True)
    records = [{"step": 0, "eval/sums/accuracy": 0.5}]
    records += [{"step": step, "lr": rate} for step, rate in enumerate(rates, start=1)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if algo:
        (run_dir / "config.json").write_text(json.dumps({"algo": algo}))
    return run_dir


def rates_of(control: str, source: Path, *, seed: int = 0, num_steps: int = len(RATES)) -> list[float]:
    return control_rates(control, source, num_steps=num_steps, seed=seed, warmup_steps=10)


def test_shuffled_rates_are_the_sources_in_another_order(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    orders = [rates_of("shuffled", source, seed=seed) for seed in range(4)]
    assert all(sorted(order) == sorted(RATES) for order in orders)
    assert len({tuple(order) for order in [RATES, *orders]}) == 5
    assert orders[1] == rates_of("shuffled", source, seed=1) == shuffled(RATES, 1)


def test_a_shorter_run_shuffles_the_rates_of_as_many_steps(tmp_path: Path) -> None:
    assert sorted(rates_of("shuffled", write_source(tmp_path / "source"), num_steps=4)) == sorted(RATES[:4])


def test_a_matched_decay_has_the_sources_warm_up_and_mean(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", schedule="snr", snr={"warmup_steps": WARMUP})
    rates = rates_of("matched_decay", source)
    assert rates[:WARMUP] == RATES[:WARMUP]
    assert sum(rates) == pytest.approx(sum(RATES), rel=1e-12)
    ratios = [b / a for a, b in zip(rates[WARMUP:], rates[WARMUP + 1 :], strict=False)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios)), "a line in the logarithm"
    assert ratios[0] < 1


def test_the_line_is_that_of_least_squares() -> None:
    import numpy as np

    rates = matched_decay(RATES, 0)
    slope = np.polyfit(np.arange(len(RATES)), np.log(RATES), 1)[0]
    assert math.log(rates[1] / rates[0]) == pytest.approx(slope)
    exact = [2.0**-step for step in range(6)]
    assert matched_decay(exact, 0) == pytest.approx(exact)
    assert matched_decay([0.5], 0) == [0.5] and matched_decay([0.5, 0.25], 2) == [0.5, 0.25]


def test_the_warm_up_is_the_sources_own(tmp_path: Path) -> None:
    """A constant schedule has none. For a source without config.json, this run's warm-up is used."""
    constant = rates_of("matched_decay", write_source(tmp_path / "a", schedule="constant", snr={"warmup_steps": 9}))
    assert constant == pytest.approx(matched_decay(RATES, 0))
    assert rates_of("matched_decay", write_source(tmp_path / "b")) == pytest.approx(matched_decay(RATES, 10))


def test_an_invalid_source_is_refused(tmp_path: Path) -> None:
    whole = write_source(tmp_path / "whole")

    def refuse(*named: str, control: str, source: Path, num_steps: int = len(RATES)) -> None:
        with pytest.raises(UserError) as found:
            rates_of(control, source, num_steps=num_steps)
        assert all(part in str(found.value) for part in named) and "\n" not in str(found.value)

    refuse("metrics file does not exist", control="shuffled", source=tmp_path / "nothing")
    refuse("10 learning rates", "num_steps 11", num_steps=11, control="shuffled", source=whole)
    for wrong in (0.0, None):
        broken = write_source(tmp_path / "broken", [*RATES[:-1], wrong])
        refuse("1 of the first 10 learning rates", control="matched_decay", source=broken)
    (whole / "config.json").write_text("{}")
    with pytest.raises(UserError) as found:
        rates_of("matched_decay", whole)
    assert found.value.where == f"control_from: {whole / 'config.json'}"
