"""Every recipe trains by name: whole runs of the real trainer on saved samples, in fp64.

The formulas are tested elsewhere (tests/unit/algo, test_penalty_gradient.py). Here the run must use them, and a run
with a penalty must be the same on one rank and on four.
"""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import pytest
import torch

from oblr_megatron.config.algo import PRESETS
from tests.distributed.launch import run_ranks
from tests.distributed.replayed import certain, config_of, exported, make_inputs, train, train_here

COMMON = (
    "model.dtype=float64",
    "num_steps=2",
    "gradnorm.mode=two_pass",
    "checkpoint.every_steps=0",
    "optimizer.lr=1e-3",
)
PENALTY = ("algo.preset=rloo", "algo.kl_coefficient=0.5", "parallel.packing=packed")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_every_recipe_trains_in_its_own_way(inputs: Path, tmp_path: Path) -> None:
    second: dict[str, dict[str, float]] = {}  # tempering begins in the second step
    for preset, recipe in PRESETS.items():
        updates = min(2, recipe.get("updates_per_batch", 1))  # the batches are small
        config = config_of(
            inputs, tmp_path / preset, f"algo.preset={preset}", *COMMON, f"algo.updates_per_batch={updates}"
        )
        [(status, said)] = run_ranks(train_here, 1, config)
        assert status == 0, said
        assert f"recipe {preset}: {config.algo.baseline} baseline" in said
        records = certain(tmp_path / preset)
        assert len(records) == 2 and all(math.isfinite(record["grad_norm"]) for record in records)
        assert "kl/mean" not in records[0]
        second[preset] = records[1]
    for one, other in combinations(PRESETS, 2):
        assert second[one]["grad_norm"] != pytest.approx(second[other]["grad_norm"], rel=1e-6), (one, other)


def test_a_penalty_on_one_rank_and_on_four(inputs: Path, tmp_path: Path) -> None:
    layout = ("parallel.tensor_model_parallel_size=2", "parallel.context_parallel_size=2")
    train(config_of(inputs, tmp_path / "one", *COMMON, *PENALTY))
    train(config_of(inputs, tmp_path / "four", *COMMON, *PENALTY, *layout), 4)
    train(config_of(inputs, tmp_path / "free", *COMMON, *PENALTY, "algo.kl_coefficient=0"))
    one, four = (certain(tmp_path / name) for name in ("one", "four"))
    assert one[0]["kl/mean"] == pytest.approx(0, abs=1e-12)  # the policy is the reference still
    assert one[1]["kl/mean"] > 1e-6
    for name in ("kl/mean", "loss", "grad_norm"):
        assert four[1][name] == pytest.approx(one[1][name], rel=1e-9), name
    weights, spread, free = (exported(tmp_path / name) for name in ("one", "four", "free"))
    for name, tensor in weights.items():
        torch.testing.assert_close(spread[name], tensor, rtol=0, atol=1e-9, msg=name)
    assert any(not torch.equal(free[name], tensor) for name, tensor in weights.items())
