"""How samples are divided over replicas changes no run: fp64, weights and metrics of one rank at 1e-10.

Saved samples replace vLLM. Lengths differ, so that tokens decide the division (tests/unit/gradient/test_folds.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.replayed import certain, config_of, exported, make_samples, train
from tests.tiny import make_hf_dir, make_moe_hf_dir

CASES = {
    "two folds for each replica": (2, "dense", ("algo.snr.num_folds=4",)),
    "replicas that share experts": (2, "moe", ("parallel.expert_model_parallel_size=2", "gradnorm.mode=two_pass")),
    "no folds": (3, "dense", ("algo.snr.estimator=momentum",)),
    "no folds, replicas that share experts": (
        4,
        "moe",
        ("parallel.expert_model_parallel_size=2", "gradnorm.mode=two_pass", "algo.snr.estimator=momentum"),
    ),
    "no folds, stash": (4, "dense", ("gradnorm.mode=stash", "algo.snr.estimator=momentum")),
    "a mixture, stash": (2, "moe", ("gradnorm.mode=stash", "algo.snr.num_folds=4")),
    "no folds, stages": (
        4,
        "dense",
        ("parallel.pipeline_model_parallel_size=2", "gradnorm.mode=two_pass", "algo.snr.estimator=momentum"),
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    make_hf_dir(directory / "dense" / "model", dtype=torch.float64)
    make_moe_hf_dir(directory / "moe" / "model", dtype=torch.float64)
    for name in ("dense", "moe"):
        make_samples(directory / name / "rollouts")
    return directory


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_run_on_one_rank(models: Path, tmp_path: Path, case: str) -> None:
    ranks, model, overrides = CASES[case]
    folds = [override for override in overrides if override.startswith("algo.snr.")]
    common = ("model.dtype=float64", "num_steps=3", "algo.schedule=constant", "checkpoint.every_steps=0")
    train(config_of(models / model, tmp_path / "one", *common, "gradnorm.mode=two_pass", *folds))
    train(config_of(models / model, tmp_path / "several", *common, *overrides), ranks)
    for wanted, found in zip(certain(tmp_path / "one"), certain(tmp_path / "several"), strict=True):
        wanted.pop("moe/aux_loss", None)  # of a microbatch, on average: docs/moe.md
        names = [name for name in wanted if name in found or not name.startswith("moe/")]  # of the plain pass alone
        differing = [name for name in names if found[name] != pytest.approx(wanted[name], rel=1e-9, nan_ok=True)]
        assert not differing, (found["step"], {name: (found[name], wanted[name]) for name in differing})
    weights = exported(tmp_path / "one")
    for name, tensor in exported(tmp_path / "several").items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-10, msg=name)
