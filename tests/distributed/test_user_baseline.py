"""A run with a user's copy of a baseline is the run with that baseline, in every norm mode and streamed.

Not covered: functions that are refused, but for one (tests/unit/algo/test_user_baseline.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.replayed import certain, config_of, exported, make_inputs, train

OWN = "tests.distributed.user_baselines"
CASES = {
    "optimal": [(2, ("gradnorm.mode=bookkeep", "rollout.overlap=stream", "rollout.wave_tokens=24"))],
    "pooled": [(1, ("gradnorm.mode=inline", "rollout.overlap=stream", "rollout.wave_tokens=24"))],
}
CASES["optimal"] += [(1, (f"gradnorm.mode={mode}",)) for mode in ("two_pass", "stash")]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize(("name", "ranks", "overrides"), [(name, *case) for name in CASES for case in CASES[name]])
def test_a_copy_is_the_baseline(
    inputs: Path, tmp_path: Path, name: str, ranks: int, overrides: tuple[str, ...]
) -> None:
    common = ("num_steps=3", "algo.schedule=constant", "checkpoint.every_steps=2", *overrides)
    for run, baseline in (("package", name), ("user", f"{OWN}:{name}")):
        train(config_of(inputs, tmp_path / run, *common, f"algo.baseline={baseline}"), ranks)
    own, package = certain(tmp_path / "user"), certain(tmp_path / "package")
    for found, wanted in zip(own, package, strict=True):
        shared = {metric: wanted[metric] for metric in found}  # the split of the noise knows the package's names alone
        assert found == pytest.approx(shared, rel=0, abs=0, nan_ok=True)
        assert {metric for metric in wanted if not metric.startswith("snr/")} <= found.keys()
    weights = exported(tmp_path / "package")
    assert all(torch.equal(tensor, weights[key]) for key, tensor in exported(tmp_path / "user").items())


def test_facts_that_do_not_hold_end_the_run_before_it_begins(inputs: Path, tmp_path: Path) -> None:
    said = train(config_of(inputs, tmp_path / "run", f"algo.baseline={OWN}:mean"), status=2)
    assert said.startswith("error: ") and "reads the response that it is for" in said and said.count("\n") == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
