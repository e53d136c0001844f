"""The average of past gradients: inner products over all ranks are those of one rank, in every kind of layout.

fp64, relative 1e-10, against whole gradients of one rank, combined by name. A run with this estimator is stopped and
resumed, in the same layout and in another. Not covered: the quality of the estimate
(tests/unit/algo/test_snr_estimators.py).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.checkpoint.store import checkpoints_of
from oblr_megatron.model.momentum import GradientMomentum
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import load_policy, make_batches, reduced_gradients
from tests.distributed.replayed import SHORT, certain, config_of, exported, make_inputs, stored, train
from tests.distributed.test_resume import assert_equal, beginning_of
from tests.tiny import make_hf_dir, make_moe_hf_dir

HORIZON = 4.0
USED = [(0, 4), (0, 2), (2, 4), (0, 4)]  # of the microbatches, step by step
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"tp": 2, "sp": True}, {"pp": 2}, {}],
    4: [{"tp": 2, "sp": True, "pp": 2}, {"tp": 2, "sp": True}],
}
EXPERTS: dict[int, list[dict[str, Any]]] = {
    2: [{"ep": 2}, {"tp": 2, "sp": True, "ep": 2, "etp": 1}, {"tp": 2, "sp": True, "etp": 1}],
    4: [{"tp": 2, "sp": True, "ep": 2}, {"pp": 2, "ep": 2}],
}


def dots_of(path: Path, layouts: list[dict[str, Any]]) -> list[tuple[list[float], list[dict[str, Tensor]]]]:
    """For each layout: the products of each step's gradient, and the gradients of this rank."""
    found = []
    for sizes in layouts:
        with layout(**sizes) as parallel:
            policy = load_policy(path, parallel)
            momentum = GradientMomentum(policy, HORIZON)
            dots, gradients = [], []
            for first, last in USED:
                gradient, sq_norm = reduced_gradients(policy, make_batches()[first:last])
                dots.append(momentum.dot_and_add(sq_norm))
                assert math.isnan(momentum.dot_and_add(0.0)) and math.isnan(momentum.dot_and_add(math.inf)), (
                    "and nothing moved"
                )
                gradients.append(gradient)
            found.append((dots, gradients if dist.get_world_size() == 1 else []))
    return found


def expected(gradients: list[dict[str, Tensor]]) -> list[float]:
    """<g_t, average of the earlier gradients>, by the weights of a bias-corrected exponential average."""
    products = []
    for step, gradient in enumerate(gradients):
        weights = [(1 - 1 / HORIZON) ** (step - 1 - earlier) for earlier in range(step)]
        dots = [sum(float((gradient[name] * before[name]).sum()) for name in gradient) for before in gradients[:step]]
        products.append(sum(w * d for w, d in zip(weights, dots, strict=True)) / sum(weights) if step else math.nan)
    return products


@pytest.mark.parametrize(
    ("make", "layouts"), [(make_hf_dir, LAYOUTS), (make_moe_hf_dir, EXPERTS)], ids=["dense", "moe"]
)
def test_every_layout_gives_the_product_of_one_rank(tmp_path: Path, make: Any, layouts: dict[int, Any]) -> None:
    path = make(tmp_path / "model")
    ((dots, gradients),) = run_ranks(dots_of, 1, path, [{}])[0]
    wanted = expected(gradients)
    assert math.isnan(dots[0]) and dots[1:] == pytest.approx(wanted[1:], rel=1e-10)
    for ranks, cases in layouts.items():
        for rank, outcomes in enumerate(run_ranks(dots_of, ranks, path, cases)):
            for case, (found, _) in zip(cases, outcomes, strict=True):
                assert math.isnan(found[0]) and found[1:] == pytest.approx(wanted[1:], rel=1e-10), (case, rank)


def constant(path: Path) -> list[float]:
    with layout() as parallel:
        policy = load_policy(path, parallel)
        momentum = GradientMomentum(policy, HORIZON)
        found = []
        for _ in range(5):
            sq_norm = reduced_gradients(policy, make_batches())[1]
            found.append(momentum.dot_and_add(sq_norm) / sq_norm)
            momentum._horizon *= 3.0  # as that of a resumed run
        return found


def test_a_constant_gradient_is_its_own_average(tmp_path: Path) -> None:
    found = run_ranks(constant, 1, make_hf_dir(tmp_path / "model"))[0]
    assert math.isnan(found[0]) and found[1:] == pytest.approx([1.0] * 4, rel=1e-13)


OVERRIDES = ("algo.snr.estimator=momentum", "algo.snr.horizon=5")
TP2 = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
PP2 = ("parallel.pipeline_model_parallel_size=2",)


def signals(run_dir: Path) -> list[float]:
    return [json.loads(line)["snr/signal_sq"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()[1:]]


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    """In bf16, where the averages have another precision than the weights; test_optimizer_offload.py has fp32."""
    inputs, whole, parts = make_inputs(tmp_path), tmp_path / "whole", tmp_path / "parts"
    overrides = (*OVERRIDES, "model.dtype=bfloat16", *SHORT)
    train(config_of(inputs, whole, *overrides))
    assert "snr/signal_sq" not in certain(whole)[0] and len(signals(whole)) == 3
    train(config_of(inputs, beginning_of(whole, parts), "checkpoint.resume=newest", *overrides))
    assert certain(parts) == certain(whole)
    assert_equal(exported(parts), exported(whole))
    found, expected = stored(*(checkpoints_of(run_dir)[0] for run_dir in (parts, whole)))
    assert_equal(found, expected)
    averages = [name for name in found if name.startswith("gradient_momentum.")]
    assert len(averages) == len([name for name in found if not name.startswith(("gradient_momentum.", "optimizer."))])


def test_another_layout_goes_on_within_rounding(tmp_path: Path) -> None:
    """From four ranks to one, in fp64."""
    inputs, whole, parts = make_inputs(tmp_path, tied=True), tmp_path / "whole", tmp_path / "parts"
    overrides = (*OVERRIDES, "model.dtype=float64")
    train(config_of(inputs, whole, *overrides, *SHORT))
    train(config_of(inputs, parts, "num_steps=2", *overrides, *TP2, *PP2), 4)
    train(config_of(inputs, parts, "checkpoint.resume=newest", *overrides, *SHORT))
    assert signals(parts) == pytest.approx(signals(whole), rel=1e-6)  # the engine's log-probs are fp32
    assert_equal(*stored(checkpoints_of(parts)[0], checkpoints_of(whole)[0]), 1e-10)
