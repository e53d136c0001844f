"""The optimizer's state leaves a GPU for pinned memory and comes back: memory is free, and updates are the same.

Not yet run on a GPU. Not covered: several ranks, an engine that takes the memory.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from oblr_megatron.config import ModelConfig, OptimizerConfig, ParallelConfig
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.policy import build_policy
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def parallel() -> Any:
    yield initialize(ParallelConfig())
    shutdown()


def updated(parallel: Parallel, offload: str, options: ParallelConfig) -> tuple[dict[str, Tensor], list[int]]:
    """Weights after three updates, and the bytes that each move freed."""
    torch.manual_seed(0)
    config = ModelConfig.model_validate({"path": "unused", "dtype": "bfloat16", "transformer_impl": "local"})
    hf_config = tiny_config(hidden_size=256, intermediate_size=1024, head_dim=64, vocab_size=4096)
    policy = build_policy(hf_config, config, parallel, options)
    for _, parameter in policy.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = PolicyOptimizer(policy, OptimizerConfig.model_validate({"offload": offload}))
    freed = []
    for _ in range(3):
        for _, parameter in policy.named_parameters():
            cast(Any, parameter).main_grad.normal_()
        optimizer.step(1e-2)
        before = torch.cuda.memory_allocated()
        optimizer.offload()
        freed.append(before - torch.cuda.memory_allocated())
        if offload == "sampling":
            assert all(tensor.is_pinned() for _, tensor in optimizer._state.tensors())
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}, freed


@pytest.mark.parametrize("sharded", [False, True])
def test_memory_is_freed_and_updates_are_the_same(parallel: Parallel, sharded: bool) -> None:
    options = ParallelConfig(use_distributed_optimizer=sharded)
    expected, kept = updated(parallel, "none", options)
    found, freed = updated(parallel, "sampling", options)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    elements = sum(weight.numel() for weight in expected.values())
    assert kept == [0, 0, 0] and min(freed) >= 12 * elements, "masters and two moments in fp32"
