"""MFU and throughput of steps made by hand. Not covered: whether the phases' times are right (test_metrics.py)."""

from __future__ import annotations

import pytest
import torch

from oblr_megatron.config import Config
from oblr_megatron.observe.performance.flops import training_flops
from oblr_megatron.observe.performance.hardware import device_named
from oblr_megatron.observe.performance.utilization import Utilization, peak_flops
from oblr_megatron.types import Sample, Scored
from tests.tiny import tiny_config
from tests.unit.configs import config_with

HF = tiny_config().to_dict()
PEAK = 1e12
TIMING = {
    "timing_s/rollout": 1.0,
    "timing_s/gradnorm": 0.5,
    "timing_s/gradient": 1.25,
    "timing_s/optimizer": 0.25,
    "timing_s/evaluate": 2.0,
    "timing_s/step": 6.0,
}
LENGTHS = [5, 7, 6, 9]  # two groups; each prompt has 3 tokens


def config_of(*overrides: str) -> Config:
    algo = {"baseline": "optimal", "snr": {"num_folds": 2}}
    return config_with(*overrides, num_prompts=2, group_size=2, algo=algo)


def metrics(*overrides: str, peak: float | None = PEAK, timing: dict[str, float] = TIMING) -> dict[str, float]:
    """Metrics of a step on 4 ranks; the rewards of its first group are equal."""
    samples = [
        Sample(n // 2, (1, 2, 3), (4,) * (length - 3), (), "", "stop", version=0) for n, length in enumerate(LENGTHS)
    ]
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    scored = Scored(rewards, torch.tensor(LENGTHS).view(2, 2) - 3, 0)
    return Utilization(HF, config_of(*overrides), 4, peak).metrics(samples, scored, timing)


def test_throughput_is_of_all_tokens_over_the_step_without_evaluation() -> None:
    assert metrics()["perf/throughput"] == sum(LENGTHS) / (4.0 * 4)


def test_mfu_counts_the_samples_that_are_trained_on() -> None:
    """Groups of equal rewards have no gradient and get no training pass. A last token is no input."""
    expected = training_flops(HF, [5, 8]) / (2.0 * 4 * PEAK)
    assert metrics()["perf/mfu/actor"] == pytest.approx(expected, rel=1e-12)
    every = training_flops(HF, [length - 1 for length in LENGTHS]) / (2.0 * 4 * PEAK)
    assert metrics("algo.baseline=none")["perf/mfu/actor"] == pytest.approx(every, rel=1e-12)
    penalised = metrics("algo.kl_coefficient=0.1")
    assert penalised["perf/mfu/actor"] == pytest.approx(every, rel=1e-12), "the penalty has a gradient everywhere"


def test_frozen_weights_have_no_gradient() -> None:
    found, whole = metrics("model.lora.rank=4")["perf/mfu/actor"], metrics()["perf/mfu/actor"]
    assert found == pytest.approx(training_flops(HF, [5, 8], frozen=True) / (2.0 * 4 * PEAK), rel=1e-12)
    assert 0.6 < found / whole < 0.8


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        (("gradnorm.mode=two_pass",), 2),
        (("gradnorm.mode=two_pass", "gradnorm.source=length"), 1),
        (("gradnorm.mode=two_pass", "algo.baseline=pooled", "gradnorm.sample_fraction=0.25"), 1.25),
        (("gradnorm.mode=inline", "algo.baseline=pooled"), 1),
        (("gradnorm.mode=stash",), 1),
        (("gradnorm.mode=bookkeep",), 1),
        (("gradnorm.mode=two_pass", "algo.baseline=rloo"), 1),
        (("gradnorm.mode=two_pass", "algo.baseline=rloo", "gradnorm.always=true"), 2),
    ],
)
def test_norms_count_if_they_take_a_separate_pass(overrides: tuple[str, ...], passes: float) -> None:
    found = metrics(*overrides)
    assert found["perf/mfu/with_norms"] == pytest.approx(passes * found["perf/mfu/actor"])


def test_without_a_peak_or_a_training_there_is_no_mfu() -> None:
    assert metrics(peak=None).keys() == {"perf/throughput"}
    assert metrics(timing={"timing_s/rollout": 1.0, "timing_s/step": 2.0}).keys() == {"perf/throughput"}


def test_the_peak_is_that_of_the_training_s_precision() -> None:
    h100, a100 = device_named("h100"), device_named("a100")
    bf16 = "model.dtype=bfloat16"
    assert peak_flops(config_of(bf16), h100) == pytest.approx(989.4e12)
    assert peak_flops(config_of(), h100) is None, "the table has no float32 peak"
    assert peak_flops(config_of(bf16), None) is None
    in_fp8 = config_of(bf16, "model.fp8=hybrid")
    assert peak_flops(in_fp8, h100) == pytest.approx(1978.9e12)
    assert peak_flops(in_fp8, a100) is None
