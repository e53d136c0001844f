"""A run with `optimizer.offload` "sampling" is the run without it, bit for bit, resumed or not.

Both optimizers of megatron-core over gloo, bf16 weights with fp32 masters and fp32 weights. On a CPU the state moves
between ordinary tensors. Not covered: pinned memory, copies by a GPU, Transformer Engine's fused Adam.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from oblr_megatron.checkpoint.distributed import training_state
from oblr_megatron.checkpoint.store import checkpoints_of
from oblr_megatron.config import OptimizerConfig, ParallelConfig
from oblr_megatron.model.optimizer import PolicyOptimizer, grad_sq_norm
from oblr_megatron.weights.export import MegatronWeights
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import load_policy, make_batches, make_gradient
from tests.distributed.replayed import SHORT, certain, config_of, exported, make_inputs, stored, train
from tests.distributed.test_resume import assert_equal, beginning_of
from tests.tiny import make_hf_dir, make_moe_hf_dir

OFFLOAD = "optimizer.offload=sampling"
BF16, SHARDED = "model.dtype=bfloat16", "parallel.use_distributed_optimizer=true"
TOLD: dict[str, tuple[str, ...]] = {
    "bf16": (BF16,),
    "bf16, sharded": (BF16, SHARDED),
    "fp32, sharded": (SHARDED, "algo.snr.estimator=momentum"),
    "sgd": ("optimizer.name=sgd", "optimizer.sgd_momentum=0.9", BF16),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), tied=True)


@pytest.mark.parametrize("nightly", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", TOLD)
def test_a_run_and_its_resume_are_the_run_without(name: str, inputs: Path, tmp_path: Path, nightly: bool) -> None:
    """Metrics, checkpoints after 2 and 4 steps, and the export; a resume may change the option.

    The three ways to resume take turns; the nightly test takes all.
    """
    told = (*TOLD[name], *SHORT)
    plain, moved, resumed = (tmp_path / kind for kind in ("plain", "moved", "resumed"))
    train(config_of(inputs, plain, *told), 2)
    train(config_of(inputs, moved, OFFLOAD, *told), 2)
    assert str(certain(moved)) == str(certain(plain)), "as text, because NaN is not equal to itself"
    assert_equal(exported(moved), exported(plain))
    for found, expected in zip(checkpoints_of(moved), checkpoints_of(plain), strict=True):
        assert_equal(*stored(found, expected))
    ways = [(moved, (OFFLOAD,)), (plain, (OFFLOAD,)), (moved, ())]
    for first, options in ways if nightly else [ways[list(TOLD).index(name) % len(ways)]]:
        train(config_of(inputs, beginning_of(first, resumed), "checkpoint.resume=newest", *options, *told), 2)
        assert_equal(exported(resumed), exported(plain))
        assert_equal(*stored(checkpoints_of(resumed)[0], checkpoints_of(plain)[0]))
        shutil.rmtree(resumed)


def moves(path: Path, dtype: str, sizes: dict[str, Any], *, sharded: bool) -> tuple[dict[str, Tensor], int]:
    """Weights after two steps with the state moved out between them, and the bytes that were moved."""
    with layout(**sizes) as parallel:
        options = ParallelConfig(use_distributed_optimizer=sharded)
        policy = load_policy(path, parallel, options, dtype=dtype)
        optimizer = PolicyOptimizer(policy, OptimizerConfig(offload="sampling"))
        weights = {name: parameter.data_ptr() for name, parameter in policy.named_parameters()}
        moved = 0
        for _ in range(2):
            make_gradient(policy, make_batches())
            optimizer.clip(grad_sq_norm(policy))
            optimizer.step(1e-2)
            values = [(key, tensor, tensor.clone()) for key, tensor in optimizer._state.tensors()]
            before = [StorageWeakRef(tensor.untyped_storage()) for _, tensor, _ in values]
            optimizer.offload()
            optimizer.offload()  # the second call does nothing
            assert optimizer._state.away
            assert all(storage.expired() for storage in before), "the device's memory is free"
            assert all(torch.equal(tensor, value) for _, tensor, value in values)
            assert {key[2] for key, *_ in values} >= {"exp_avg", "exp_avg_sq"}
            assert any(key[2] == "master" for key, *_ in values) == (dtype == "bfloat16")
            moved = sum(tensor.nbytes for _, tensor, _ in values)
            training_state(policy, optimizer)  # reads the state where it is
            assert optimizer._state.away
        assert {name: parameter.data_ptr() for name, parameter in policy.named_parameters()} == weights
        return {name: tensor.clone() for name, tensor in MegatronWeights(policy)}, moved


def stays(path: Path, dtype: str, sizes: dict[str, Any], *, sharded: bool) -> dict[str, Tensor]:
    """The same without moves."""
    with layout(**sizes) as parallel:
        policy = load_policy(path, parallel, ParallelConfig(use_distributed_optimizer=sharded), dtype=dtype)
        optimizer = PolicyOptimizer(policy, OptimizerConfig())
        for _ in range(2):
            make_gradient(policy, make_batches())
            optimizer.clip(grad_sq_norm(policy))
            optimizer.step(1e-2)
            optimizer.offload()
            assert not optimizer._state.away
        return {name: tensor.clone() for name, tensor in MegatronWeights(policy)}


def both(path: Path, sizes: dict[str, Any]) -> list[tuple[dict[str, Tensor], dict[str, Tensor], int]]:
    found = []
    for dtype in ("float32", "bfloat16"):
        for sharded in (False, True):
            weights, moved = moves(path, dtype, sizes, sharded=sharded)
            found.append((stays(path, dtype, sizes, sharded=sharded), weights, moved))
    return found


@pytest.mark.parametrize(("mixture", "sizes"), [(False, {}), (True, {"ep": 2}), (False, {"pp": 2})])
def test_memory_is_freed_and_the_updates_are_the_same(mixture: bool, sizes: dict[str, Any], tmp_path: Path) -> None:
    path = make_moe_hf_dir(tmp_path / "model") if mixture else make_hf_dir(tmp_path / "model", tied=True)
    for rank in run_ranks(both, 2, path, sizes):
        for expected, found, moved in rank:
            assert_equal(found, expected)
            assert moved > 0
