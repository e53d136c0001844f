"""`study scaling`: valid cases, the ranking of hand-made rows, rows of synthetic times, one measured case on one rank.

Not covered: several ranks (tests/distributed runs such layouts), prediction of a real machine (the study's result).
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from oblr_megatron.checks.layout import check_layout
from oblr_megatron.cli import main
from oblr_megatron.extras.planner.calibration import Observation, predicted_phases
from oblr_megatron.extras.planner.constants import CPU, cpu_machine, read_constants
from oblr_megatron.extras.planner.setting import Setting
from oblr_megatron.model.parallel import shutdown
from oblr_megatron.preflight.inputs import check_dealing
from studies.scaling import Ranking, Row, chain, noise_of, rows_of
from studies.scaling_cases import CASES, Case, case_named
from studies.scaling_rank import WARM_UP, measure


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_are_valid_and_have_distinct_names(case: Case) -> None:
    check_layout(case.hf_config(), case.config(), case.ranks)
    check_dealing(case.hf_config(), case.config(), case.ranks)
    assert case_named(case.name) is case


def row(measured: float, predicted: float, noise: float = 0.0) -> Row:
    return Row("x", 1, {"gradient": measured}, {"gradient": predicted}, {}, noise, 100, 105)


def test_ranking_counts_pairs_that_differ_beyond_noise() -> None:
    """1.0 and 1.01 differ by less than 2 x 2%, so their order does not count. 2 and 4 are predicted wrongly."""
    rows = [row(1.0, 1.1), row(1.01, 1.0), row(2.0, 5.0), row(4.0, 3.0)]
    found = Ranking.of(rows)
    assert (found.pairs, found.right, found.layouts, found.distinct) == (5, 4, 4, 3)
    assert found.spearman == pytest.approx(0.6) and found.noise == 0.02
    assert Ranking.of([replace(each, noise=1.0) for each in rows]).pairs == 0
    assert rows[0].memory_ratio == 1.05 and rows[0].ratio == pytest.approx(1.1)


def test_chain_and_noise() -> None:
    assert chain([4.0, 1.0, 1.05, 2.0], log(1.5)) == [1.0, 2.0, 4.0]
    rounds = [{"gradient": [1.0, 9.0], "optimizer": [0.0, 0.0]}, {"gradient": [5.0, 2.0], "optimizer": [0.0, 0.0]}]
    assert noise_of(rounds) == pytest.approx(log(2)) and noise_of(rounds[:1]) == 0


CHOSEN = ("one rank", "hidden 128", "tp2", "pp2", "dp2", "dp4")


def made(name: str) -> dict[str, object]:
    """One round's synthetic record of a case: the model's own times under other constants."""
    case, constants = case_named(name), replace(CPU, product=0.4, message_s=2e-3)
    empty = Observation(name, Setting(case.hf_config(), case.config(), case.ranks, cpu_machine(2)), {})
    seconds = {phase: [value, 1.5 * value] for phase, value in predicted_phases(empty, constants).items()}
    return {"name": name, "memory": 100, **seconds}


def test_a_row_is_predicted_from_the_others() -> None:
    """Times that follow the model are predicted from the other rows, in the right order."""
    rows, every = rows_of({name: [made(name)] for name in CHOSEN}, cpu_machine(2))
    assert every.rms < 0.05
    assert [each.name for each in rows] == list(CHOSEN)
    assert all(0.75 < each.ratio < 1.33 for each in rows)
    ranking = Ranking.of(rows)
    assert ranking.right >= ranking.pairs - 1 and ranking.spearman > 0.8


def test_the_command_writes_table_chart_and_constants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "measured.json").write_text(json.dumps({name: [made(name)] for name in CHOSEN}))
    for _ in range(2):  # the second call replaces the files of the first
        capsys.readouterr()
        assert main(["study", "scaling", "--out", str(tmp_path), "--again"]) == 0
    said = capsys.readouterr().out
    assert said.strip() == (tmp_path / "scaling.md").read_text().strip() and "Rank correlation" in said
    record = json.loads((tmp_path / "scaling.json").read_text())
    assert [each["name"] for each in record["rows"]] == list(CHOSEN)
    assert {path.name for path in tmp_path.glob("scaling.*")} == {
        f"scaling.{kind}" for kind in ("json", "md", "svg", "png")
    }
    assert read_constants(tmp_path / "constants.json").product > 0


def test_one_rank_is_measured() -> None:
    """Real steps; the memory estimate, to which every token is a response token, is within 10% of the measured peak."""
    case = Case("small", 1, hidden=64, prompts=1, folds=1)
    try:
        found = measure(case, 2, memory=True)
    finally:
        shutdown()
    assert len(found["gradient"]) == len(found["optimizer"]) == 2 and WARM_UP == 1
    assert all(seconds > 0 for seconds in found["gradient"])
    assert case.estimated_bytes() == pytest.approx(found["memory"], rel=0.1)
