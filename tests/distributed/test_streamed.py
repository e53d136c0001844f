"""`rollout.overlap = "stream"` in fp64: prompts come in waves, out of order, and a run ends with the same weights.

Saved samples replace vLLM; a replay hands out the prompts with short responses first. A wave is smaller than a batch.
Each gradient of a step is compared with the oracle in test_gradnorm_modes.py, in all layouts and modes. Real engines
are in tests/e2e/test_streamed.py. Not covered: CUDA.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.replayed import certain, config_of, exported, make_inputs, train

F64 = "model.dtype=float64"
GREATEST = "tests.distributed.rewards:greatest"
STREAM = ("rollout.overlap=stream", "rollout.wave_tokens=24")
CASES = {
    "pooled inline": (1, ("algo.baseline=pooled", "gradnorm.mode=inline")),
    "pooled bookkeep on two replicas": (2, ("algo.baseline=pooled", "gradnorm.mode=bookkeep")),
    "pooled two_pass pp2": (
        2,
        ("algo.baseline=pooled", "gradnorm.mode=two_pass", "parallel.pipeline_model_parallel_size=2"),
    ),
    "optimal bookkeep on two replicas": (2, ("algo.baseline=optimal",)),
    "optimal_pooled two_pass pp2": (
        2,
        ("algo.baseline=optimal_pooled", "gradnorm.mode=two_pass", "parallel.pipeline_model_parallel_size=2"),
    ),
    "a penalty": (1, ("algo.baseline=rloo", "algo.kl_coefficient=0.1", "gradnorm.mode=two_pass")),
    "pooled, a share of the norms": (
        1,
        ("algo.baseline=pooled", "gradnorm.sample_fraction=0.5", "gradnorm.mode=two_pass"),
    ),
    "pooled, a reward of whole groups": (
        1,
        (f"reward.name={GREATEST}", "algo.baseline=pooled", "gradnorm.mode=inline"),
    ),
    "pooled, each prompt a fold": (2, ("algo.baseline=pooled", "gradnorm.mode=inline", "algo.snr.estimator=prompts")),
    "momentum on three replicas": (3, ("algo.baseline=optimal", "algo.snr.estimator=momentum")),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_the_order_in_which_prompts_come_changes_nothing(inputs: Path, tmp_path: Path, case: str) -> None:
    ranks, overrides = CASES[case]
    common = (F64, "num_steps=3", "algo.schedule=constant", "checkpoint.every_steps=0", *overrides)
    for name, more in (("whole", ()), ("streamed", STREAM)):
        train(config_of(inputs, tmp_path / name, *common, *more), ranks)
    whole, streamed = certain(tmp_path / "whole"), certain(tmp_path / "streamed")
    waves = [step.get("rollout/waves", 0) for step in streamed]
    assert waves[0] == 0 if "pooled" in case else waves[0] > 1, "a pool begins with a whole batch"
    assert min(waves[1:]) > 1, "otherwise nothing is shown"
    for found, wanted in zip(streamed, whole, strict=True):
        differing = [name for name in wanted if found[name] != pytest.approx(wanted[name], rel=1e-9, nan_ok=True)]
        assert not differing, (found["step"], {name: (found[name], wanted[name]) for name in differing})
    found, wanted = exported(tmp_path / "streamed"), exported(tmp_path / "whole")
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=name)


def test_router_metrics_of_a_mixture_cover_all_waves(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path, mixture=True, dtype=torch.float64)
    common = (F64, "num_steps=2", "algo.schedule=constant", "checkpoint.every_steps=0", "algo.baseline=rloo")
    for name, more in (("whole", ()), ("streamed", STREAM)):
        train(config_of(inputs, tmp_path / name, *common, *more))
    whole, streamed = certain(tmp_path / "whole"), certain(tmp_path / "streamed")
    names = {name for name in whole[-1] if name.startswith("moe/")} - {
        "moe/aux_loss"
    }  # of each microbatch by definition
    assert names and streamed[-1]["rollout/waves"] > 1
    for found, wanted in zip(streamed, whole, strict=True):
        assert {name: found[name] for name in names} == pytest.approx({name: wanted[name] for name in names}, rel=1e-5)


def test_a_resumed_run_takes_the_same_waves(inputs: Path, tmp_path: Path) -> None:
    """The pools of earlier steps are restored, so that the advantage of a wave is the same to the bit."""
    options = (F64, "num_steps=4", "algo.baseline=pooled", "algo.schedule=constant", "gradnorm.mode=inline", *STREAM)
    train(config_of(inputs, tmp_path / "unbroken", *options, "checkpoint.every_steps=2"))
    train(config_of(inputs, tmp_path / "broken", *options, "checkpoint.every_steps=2", "num_steps=2"))
    train(config_of(inputs, tmp_path / "broken", *options, "checkpoint.resume=newest"))
    assert certain(tmp_path / "broken")[2:] == certain(tmp_path / "unbroken")[2:]
    first, second = exported(tmp_path / "broken"), exported(tmp_path / "unbroken")
    assert all(torch.equal(first[name], second[name]) for name in second)
