"""Run on one rank with the simulated device and Transformer Engine's Python: Adam's state crosses to torch and back.

    python -m tests.sim_cuda.adam MODEL_DIRECTORY SCRATCH

Each implementation saves after two steps. Both load this state and take a third. Prints the largest relative difference
of their moves for each (distributed optimizer or not, dtype, implementation that saved).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer

from oblr_megatron.checkpoint.distributed import TorchDistWriter, load_training_state, training_state
from oblr_megatron.config import OptimizerConfig, ParallelConfig
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.policy import Policy
from oblr_megatron.weights.export import MegatronWeights
from tests.distributed.passes import load_policy

ENGINE, TORCH = "transformer_engine", "torch"


def opened(
    path: Path, parallel: Parallel, options: ParallelConfig, dtype: str, kind: str
) -> tuple[Policy, PolicyOptimizer]:
    """A policy and its optimizer by one implementation."""
    policy = load_policy(path, parallel, options, dtype=dtype)
    with mock.patch.object(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", kind == TORCH):  # then AdamW
        optimizer = PolicyOptimizer(policy, OptimizerConfig(weight_decay=0.1))
    assert isinstance(optimizer._optimizer.chained_optimizers[0].optimizer, torch.optim.Adam) == (kind == TORCH)
    return policy, optimizer


def step(policy: Policy, optimizer: PolicyOptimizer, number: int) -> dict[str, torch.Tensor]:
    """The weights after a step with gradients that are a function of its number."""
    generator = torch.Generator().manual_seed(number)
    policy.zero_grad()
    for _, parameter in policy.named_parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step(1e-2)
    return {name: tensor.double().cpu() for name, tensor in MegatronWeights(policy)}


def main(directory: str, scratch: str) -> None:
    """All cases."""
    path, found = Path(directory), {}
    parallel = initialize(ParallelConfig())
    for sharded in (False, True):
        options = ParallelConfig(use_distributed_optimizer=sharded)
        for dtype in ("float32", "bfloat16"):
            for saver in (ENGINE, TORCH):
                policy, optimizer = opened(path, parallel, options, dtype, saver)
                step(policy, optimizer, 1)
                before = step(policy, optimizer, 2)
                saved = Path(scratch) / f"{sharded} {dtype} {saver}"
                saved.mkdir()
                TorchDistWriter(dist.new_group(), parallel).stage(training_state(policy, optimizer), saved)()
                after = []
                for kind in (ENGINE, TORCH):
                    policy, optimizer = opened(path, parallel, options, dtype, kind)
                    load_training_state(policy, optimizer, saved)
                    after.append(step(policy, optimizer, 3))
                apart = [
                    (after[0][name] - after[1][name]).abs().max() / (after[0][name] - before[name]).abs().max()
                    for name in before
                ]
                found[saved.name] = float(max(apart))
    print(json.dumps(found))
    shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
