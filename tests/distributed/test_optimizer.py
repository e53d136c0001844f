"""Steps of the policy's optimizer equal torch.optim's on transformers' model, in every layout; clipping; fp32 masters.

Not covered: Transformer Engine's and Apex's fused optimizers, saving and loading (checkpoint tests).
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.config import OptimizerConfig
from oblr_megatron.model.optimizer import PolicyOptimizer, grad_sq_norm
from oblr_megatron.weights.export import MegatronWeights
from tests.distributed.launch import RankError, layout, run_ranks
from tests.distributed.passes import (
    COEFFICIENTS,
    TEMPERATURE,
    assert_close,
    load_policy,
    make_batches,
    make_gradient,
)
from tests.oracle import load_oracle, oracle_gradients
from tests.tiny import make_hf_dir

LAYOUTS = {1: [{}], 2: [{"tp": 2, "sp": True}, {"pp": 2}, {}], 4: [{"tp": 2, "pp": 2}]}
RATES = [3e-3, 1e-3, 2e-3]  # another one each step
CONFIGS = {
    "adam": OptimizerConfig(name="adam", weight_decay=0.1, clip_grad=5.0),
    "sgd": OptimizerConfig(name="sgd", weight_decay=0.1, sgd_momentum=0.9, clip_grad=0.0),
}


def weights_after_steps(path: Path, name: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Squared norms of each step's gradient, and the weights at the end."""
    results = []
    for sizes in LAYOUTS[dist.get_world_size()]:
        with layout(**sizes) as parallel:
            policy = load_policy(path, parallel)
            optimizer = PolicyOptimizer(policy, CONFIGS[name])
            sq_norms = []
            for lr in RATES:
                make_gradient(policy, make_batches())
                sq_norms.append(grad_sq_norm(policy))
                optimizer.clip(sq_norms[-1])
                optimizer.step(lr)
            results.append((sq_norms, {key: tensor.clone() for key, tensor in MegatronWeights(policy)}))
    return results


def reference_after_steps(path: Path, name: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same with torch.optim: norm weights do not decay, the gradient is clipped by its global norm."""
    config, model = CONFIGS[name], load_oracle(path)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = (
        torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
        if name == "adam"
        else torch.optim.SGD(groups, momentum=config.sgd_momentum)
    )
    sq_norms = []
    for lr in RATES:
        gradients = oracle_gradients(model, make_batches(), COEFFICIENTS, TEMPERATURE).values()
        sq_norms.append(sum(float(grad.square().sum()) for grad in gradients))
        if config.clip_grad:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return sq_norms, {key: parameter.detach() for key, parameter in model.named_parameters()}


@pytest.mark.parametrize(("world_size", "name"), [(1, "adam"), (1, "sgd"), (2, "adam"), (2, "sgd"), (4, "adam")])
def test_steps_equal_torch_optim(world_size: int, name: str, tmp_path: Path) -> None:
    path = make_hf_dir(tmp_path / "model", tied=True)
    expected_norms, expected = reference_after_steps(path, name)
    before = load_oracle(path).state_dict()
    for rank in run_ranks(weights_after_steps, world_size, path, name):
        for sq_norms, weights in rank:
            assert sq_norms == pytest.approx(expected_norms, rel=1e-9)
            for key, weight in weights.items():
                moved = expected[key] - before[key]
                assert_close(weight - before[key], moved, key, rtol=1e-8)


def clipped_norms(path: Path) -> tuple[float, float, float, float]:
    with layout() as parallel:
        policy = load_policy(path, parallel)
        optimizer = PolicyOptimizer(policy, OptimizerConfig(clip_grad=0.5))
        make_gradient(policy, make_batches())
        before = grad_sq_norm(policy)
        factor = optimizer.clip(before)
        after = grad_sq_norm(policy)
        return math.sqrt(before), factor, math.sqrt(after), optimizer.clip(after * 0.99)


def test_clip_scales_to_the_limit_and_only_down(tmp_path: Path) -> None:
    [(before, factor, after, second)] = run_ranks(clipped_norms, 1, make_hf_dir(tmp_path / "model"))
    assert before > 0.5
    assert factor == pytest.approx(0.5 / before, rel=1e-12)
    assert after == pytest.approx(0.5, rel=1e-12)
    assert second == 1.0


def clip_nan(path: Path) -> None:
    with layout() as parallel:
        PolicyOptimizer(load_policy(path, parallel), OptimizerConfig()).clip(math.nan)


def test_a_norm_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="would destroy the weights"):
        run_ranks(clip_nan, 1, make_hf_dir(tmp_path / "model"))


def bf16_steps(path: Path) -> dict[str, Tensor]:
    """Norm weights (about 1, spaced 2^-7 or 2^-8 in bf16) under steps of 2^-12 each."""
    with layout() as parallel:
        policy = load_policy(path, parallel, dtype="bfloat16")
        optimizer = PolicyOptimizer(policy, OptimizerConfig(name="sgd", clip_grad=0.0))
        weight = dict(policy.named_parameters())["decoder.final_layernorm.weight"]
        states = {"start": weight.detach().clone()}
        policy.zero_grad()
        weight.main_grad.fill_(1.0)
        assert weight.main_grad.dtype == torch.float32
        for step in range(1, 65):
            optimizer.step(2.0**-12)
            if step == 1:
                states["one step"] = weight.detach().clone()
        states["64 steps"] = weight.detach().clone()
        return states


def test_bf16_weights_follow_fp32_masters(tmp_path: Path) -> None:
    """Steps too small for bf16 add up in the masters: 64 steps of 2^-12 are 2^-6."""
    [states] = run_ranks(bf16_steps, 1, make_hf_dir(tmp_path / "model", dtype=torch.bfloat16))
    large = states["start"].abs() > 1  # spacing 2^-7: a step of 2^-12 is far below half of it
    assert large.any()
    assert torch.equal(states["one step"][large], states["start"][large])
    assert torch.equal(states["64 steps"], (states["start"].float() - 2.0**-6).bfloat16())
