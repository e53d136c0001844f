"""Gradients and the optimizer's state leave a GPU while engines sample: memory is free, and training is the same.

Passed on an H200 on 2026-11-27. Not covered: several ranks, an engine that takes the memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.config import ParallelConfig, parse_config
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.policy import build_policy
from oblr_megatron.norms.buffer import megatron_buffers
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import whole_step
from oblr_megatron.types import Sample, Scored
from tests.tiny import tiny_config, tiny_moe_config

PROMPTS, GROUP, STEPS = 2, 2, 2
SHARDED, OFFLOAD = {"use_distributed_optimizer": True}, {"offload": "sampling"}
POOLED = {"baseline": "pooled"}
CASES: dict[str, dict[str, Any]] = {
    "stash": {"gradnorm": {"mode": "stash"}, "optimizer": OFFLOAD},
    "inline, distributed optimizer": {"algo": POOLED, "gradnorm": {"mode": "inline"}, "parallel": SHARDED},
    "two_pass, distributed optimizer": {"gradnorm": {"mode": "two_pass"}, "parallel": SHARDED, "optimizer": OFFLOAD},
    "experts": {"gradnorm": {"mode": "two_pass"}, "parallel": SHARDED, "model": {"transformer_impl": "auto"}},
}

has_te = importlib.util.find_spec("transformer_engine") is not None  # experts need its layers; they have their buffer


@pytest.fixture(scope="module")
def parallel() -> Any:
    yield initialize(ParallelConfig())
    shutdown()


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def trained(parallel: Parallel, case: str, *, turns: bool) -> tuple[dict[str, Tensor], int, list[tuple[int, int]]]:
    """Weights after some steps, bytes of all gradients, and what each step's release and offload freed if engines
    take `turns`.
    """
    options = CASES[case]
    table = {
        "run_dir": "unused",
        "num_prompts": PROMPTS,
        "group_size": GROUP,
        "data": {"train": "unused"},
        **options,
        "model": {"path": "unused", "dtype": "bfloat16", "transformer_impl": "local"} | options.get("model", {}),
        "algo": {"baseline": "optimal", "snr": {"num_folds": PROMPTS}} | options.get("algo", {}),
    }
    config = parse_config(table)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 4096}
    hf_config = (tiny_moe_config if case == "experts" else tiny_config)(**sizes)
    policy = build_policy(hf_config, config.model, parallel, config.parallel)
    for _, parameter in policy.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer, gradient = PolicyOptimizer(policy, config.optimizer), StepGradient(policy, config)
    samples = [
        Sample(n // GROUP, (5, 6, 7 + n), tuple(range(9 + n, 40 + 7 * n)), (-8.0,) * (31 + 6 * n), "", "stop", 0)
        for n in range(PROMPTS * GROUP)
    ]
    lengths = torch.tensor([sample.length for sample in samples]).view(PROMPTS, GROUP)
    scored = Scored(torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64), lengths, 0)
    freed = []
    for step in range(STEPS):
        gradient.begin(step + 1).add(whole_step(Batch([], samples, scored)), AdvantageRule(scored, config))
        for stats in gradient.updates():
            optimizer.clip(stats.sq_norm)
            optimizer.step(1e-2)
        if turns:
            held = [torch.cuda.memory_allocated()]
            for release in (gradient.release, optimizer.offload):
                release()
                held.append(torch.cuda.memory_allocated())
            freed.append((held[0] - held[1], held[1] - held[2]))
    bytes_of_gradients = sum(buffer.grad_data.nbytes for chunk in policy.chunks for buffer in megatron_buffers(chunk))
    return {name: weight.detach().clone() for name, weight in policy.named_parameters()}, bytes_of_gradients, freed


@pytest.mark.parametrize("case", [each for each in CASES if each != "experts" or has_te])
def test_memory_is_freed_and_training_is_the_same(parallel: Parallel, case: str) -> None:
    expected, gradients, _ = trained(parallel, case, turns=False)
    weights, _, freed = trained(parallel, case, turns=True)
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    released, offloaded = (min(each) for each in zip(*freed, strict=True))
    assert released >= gradients * (1 + GROUP * (case == "stash"))
    elements = sum(weight.numel() for weight in expected.values())
    assert offloaded >= 12 * elements * ("optimizer" in CASES[case]), "masters and two moments in fp32"
