"""megatron-core's DistributedOptimizer over gloo takes the plain optimizer's steps with a share of its state a rank.

fp32 and bf16 with fp32 masters (it has no fp64) under data, tensor, sequence, pipeline (tied embeddings), context and
expert parallelism. Its checkpoints continue bit for bit in the same layout, and within rounding in other layouts and
with the plain optimizer. Weights are compared right after the step, as a push sends them.

Not covered: Transformer Engine's and Apex's fused Adam, FP8 weights, NCCL.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.checkpoint.distributed import TorchDistWriter, load_training_state, training_state
from oblr_megatron.checkpoint.store import checkpoints_of
from oblr_megatron.config import OptimizerConfig, ParallelConfig
from oblr_megatron.model.momentum import GradientMomentum
from oblr_megatron.model.optimizer import PolicyOptimizer, grad_sq_norm
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import Policy
from oblr_megatron.model.shards import held
from oblr_megatron.weights.export import MegatronWeights
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import load_policy, make_batches, make_gradient
from tests.distributed.replayed import SHORT, certain, config_of, exported, make_inputs, stored, train
from tests.distributed.test_resume import assert_equal, beginning_of
from tests.tiny import make_hf_dir, make_moe_hf_dir

SHARDED = ParallelConfig(use_distributed_optimizer=True)
RATES = [3e-3, 1e-3, 2e-3]
MOE, TIED = "moe", "tied"
CASES: dict[int, list[tuple[str, str, dict[str, Any]]]] = {
    2: [
        (TIED, "float32", {}),
        (TIED, "bfloat16", {}),
        (TIED, "float32", {"cp": 2}),
        (MOE, "float32", {"ep": 2}),
        (MOE, "bfloat16", {}),
    ],
    4: [
        (TIED, "float32", {}),
        (TIED, "float32", {"tp": 2, "sp": True}),
        (TIED, "float32", {"pp": 2}),
        (TIED, "bfloat16", {"pp": 2}),
        (MOE, "float32", {"ep": 2}),
    ],
}
Run = tuple[list[tuple[float, float, float]], dict[str, Tensor], int]
"""(squared norm, clip factor, <g, average>) of each step; weights right after the last; bytes of optimizer state."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    make_hf_dir(directory / TIED, tied=True)
    make_moe_hf_dir(directory / MOE)
    return directory


def state_bytes(optimizer: PolicyOptimizer) -> int:
    """Moments, and masters if there are any."""
    total = 0
    for part in optimizer._optimizer.chained_optimizers:
        for main, state in part.optimizer.state.items():
            tensors = [tensor for key, tensor in state.items() if key != "step"]
            tensors += [main] if part.config.bf16 else []
            total += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return total


def steps(path: Path, parallel: Parallel, options: ParallelConfig, dtype: str) -> Run:
    policy = load_policy(path, parallel, options, dtype=dtype)
    optimizer = PolicyOptimizer(policy, OptimizerConfig(weight_decay=0.1, clip_grad=1.0))
    momentum, metrics = GradientMomentum(policy, 3.0), []
    for lr in RATES:
        make_gradient(policy, make_batches())
        sq_norm = grad_sq_norm(policy)
        found = momentum.dot_and_add(sq_norm)
        metrics.append((sq_norm, optimizer.clip(sq_norm), found))
        optimizer.step(lr)
    weights = {name: tensor.clone() for name, tensor in MegatronWeights(policy)}
    return metrics, weights, state_bytes(optimizer)


def both(models: Path) -> list[tuple[Run, Run]]:
    """(plain, sharded) of each case."""
    results = []
    for model, dtype, sizes in CASES[dist.get_world_size()]:
        with layout(**sizes) as parallel:
            plain = steps(models / model, parallel, ParallelConfig(), dtype)
            results.append((plain, steps(models / model, parallel, SHARDED, dtype)))
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_steps_norms_and_factors_are_the_plain_optimizers(world_size: int, models: Path) -> None:
    """Replicas share moments and masters; with context parallelism all its ranks do."""
    ranks = run_ranks(both, world_size, models)
    for index, (model, dtype, sizes) in enumerate(CASES[world_size]):
        case = (model, dtype, sizes)
        for plain, sharded in (rank[index] for rank in ranks):
            for expected, found in zip(plain[0], sharded[0], strict=True):
                assert found == pytest.approx(expected, rel=1e-6, nan_ok=True), case
            assert found[1] < 1, "a step that was clipped"
            assert plain[1].keys() == sharded[1].keys()
            for name, weight in plain[1].items():
                tolerance = 1e-6 if dtype == "float32" else 2.0**-8
                torch.testing.assert_close(sharded[1][name], weight, rtol=tolerance, atol=1e-6, msg=f"{case} {name}")
        assert any(plain[1] for plain, _ in (rank[index] for rank in ranks)), "weights were compared"
        replicas = world_size // sizes.get("tp", 1) // sizes.get("pp", 1)
        whole, parts = (sum(rank[index][which][2] for rank in ranks) for which in (0, 1))
        if model == TIED:
            assert parts * replicas == whole, case
        else:  # experts are shared by fewer
            assert parts < whole, case


def spans_of(models: Path) -> list[tuple[str, int, int, int]]:
    with layout() as parallel:
        policy = load_policy(models / TIED, parallel, SHARDED, dtype="float32")
        spans = held(policy)
        return [(name, spans[p].start, spans[p].stop, p.numel()) for name, p in policy.named_parameters()]


def test_the_shares_of_all_ranks_are_the_parameter(models: Path) -> None:
    """Without gaps, in the order of the ranks. Some parameters are cut in two, some are whole on one rank."""
    first, second = run_ranks(spans_of, 2, models)
    kinds = set()
    for (name, start, middle, size), (_, again, stop, _) in zip(first, second, strict=True):
        lengths = sorted((middle - start, stop - again))
        assert sum(lengths) == size, name
        if lengths[0]:
            assert (start, middle, stop) == (0, again, size), name
        kinds.add("cut" if lengths[0] else "whole")
    assert kinds == {"cut", "whole"}


OPTION = "parallel.use_distributed_optimizer=true"
PP2 = ("parallel.pipeline_model_parallel_size=2",)
TOLD = {"momentum": ("algo.snr.estimator=momentum",), "bf16": ("model.dtype=bfloat16", "gradnorm.mode=stash")}


@dataclass(frozen=True)
class Unbroken:
    """Runs of 4 steps on two replicas, saved after 2 and 4, and the tensors of the last checkpoint."""

    directory: Path  # of plain/ and sharded/
    tensors: dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), tied=True)


@pytest.fixture(scope="module")
def unbroken(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Unbroken]:
    """By their name in TOLD."""
    runs = {}
    for name, told in TOLD.items():
        directory = tmp_path_factory.mktemp(name)
        train(config_of(inputs, directory / "plain", *told, *SHORT), 2)
        train(config_of(inputs, directory / "sharded", OPTION, *told, *SHORT), 2)
        kinds = ("plain", "sharded")
        tensors = dict(zip(kinds, stored(*(checkpoints_of(directory / kind)[0] for kind in kinds)), strict=True))
        runs[name] = Unbroken(directory, tensors)
    return runs


@pytest.mark.parametrize("name", TOLD)
def test_a_run_is_the_plain_run(unbroken: dict[str, Unbroken], name: str) -> None:
    """Fold norms, estimates, clipping and every tensor of the checkpoint."""
    directory, tensors = unbroken[name].directory, unbroken[name].tensors
    runs = [certain(directory / kind) for kind in ("plain", "sharded")]
    assert len(runs[0]) == len(runs[1]) == 4
    for expected, found in zip(*runs, strict=True):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)
    assert_equal(exported(directory / "sharded"), exported(directory / "plain"), 1e-6)
    assert_equal(tensors["sharded"], tensors["plain"], 1e-6)
    assert any("exp_avg_sq" in key for key in tensors["plain"])


@pytest.mark.parametrize(
    ("name", "first", "ranks", "overrides", "tolerance"),
    [
        ("momentum", "sharded", 2, (OPTION,), 0.0),
        ("momentum", "plain", 2, (OPTION,), 1e-6),
        pytest.param("momentum", "sharded", 1, (), 1e-6, marks=pytest.mark.nightly),
        ("momentum", "sharded", 4, (OPTION, *PP2), 1e-6),
        ("bf16", "sharded", 2, (OPTION,), 0.0),
        ("bf16", "plain", 2, (OPTION,), 1e-6),
        ("bf16", "sharded", 2, (), 1e-6),
    ],
    ids=["same", "from_plain", "to_one_rank", "to_pp2xdp2", "bf16_same", "bf16_from_plain", "bf16_to_plain"],
)
def test_another_layout_and_the_plain_optimizer_go_on(
    unbroken: dict[str, Unbroken],
    inputs: Path,
    tmp_path: Path,
    name: str,
    first: str,
    ranks: int,
    overrides: tuple[str, ...],
    tolerance: float,
) -> None:
    """Two steps after the checkpoint: bit for bit in the same layout, else within rounding."""
    run = unbroken[name].directory / first
    copy = beginning_of(run, tmp_path / "run")
    train(config_of(inputs, copy, "checkpoint.resume=newest", *overrides, *TOLD[name], *SHORT), ranks)
    assert_equal(exported(copy), exported(run), tolerance)
    (found,) = stored(checkpoints_of(copy)[0])
    assert_equal(found, unbroken[name].tensors[first], tolerance)


def experts_go_on(path: Path, directory: Path) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Weights after two steps: (unbroken, second step from a checkpoint of the first)."""
    results = []
    directory.mkdir(exist_ok=True)
    with layout(ep=2) as parallel:
        policy = load_policy(path, parallel, SHARDED, dtype="float32")
        optimizer = PolicyOptimizer(policy, OptimizerConfig())
        step(policy, optimizer)
        writer = TorchDistWriter(dist.new_group(), parallel)
        writer.stage(training_state(policy, optimizer), directory)()
        step(policy, optimizer)
        unbroken = {name: tensor.clone() for name, tensor in MegatronWeights(policy)}
    for sizes, options in (({"ep": 2}, SHARDED), ({}, SHARDED), ({}, ParallelConfig())):
        with layout(**sizes) as parallel:
            policy = load_policy(path, parallel, options, dtype="float32")
            optimizer = PolicyOptimizer(policy, OptimizerConfig())
            load_training_state(policy, optimizer, directory)
            step(policy, optimizer)
            results.append((unbroken, {name: tensor.clone() for name, tensor in MegatronWeights(policy)}))
    return results


def step(policy: Policy, optimizer: PolicyOptimizer) -> None:
    make_gradient(policy, make_batches())
    optimizer.clip(grad_sq_norm(policy))
    optimizer.step(RATES[0])


def test_experts_go_on_in_other_layouts(models: Path, tmp_path: Path) -> None:
    """From expert parallelism to whole experts, sharded and plain."""
    results = run_ranks(experts_go_on, 2, models / MOE, tmp_path / "step")[0]
    for unbroken, resumed in results:
        assert_equal(resumed, unbroken, 1e-6)
    assert results[0][0] and all(torch.equal(results[0][1][name], weight) for name, weight in results[0][0].items())
