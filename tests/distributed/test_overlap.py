"""With `parallel.overlap_grad_reduce` the sum over replicas starts during backward and has the same result.

fp64, relative 1e-10, with buckets small enough that there are several, in three steps: megatron-core learns in the
first which gradients a bucket waits for. Also whole runs, with idle replicas, and with the distributed optimizer.

Not covered: the time saved, NCCL, Transformer Engine's layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.config import ParallelConfig
from oblr_megatron.model import policy as policy_module
from oblr_megatron.model.step import (
    finish_overlapped_grads,
    reduce_data_parallel_grads,
    reduce_model_parallel_grads,
    run_schedule,
)
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import (
    assert_close,
    load_policy,
    make_batches,
    weighted_logprob_loss,
    whole_gradients,
)
from tests.distributed.replayed import certain, config_of, exported, make_inputs, train
from tests.tiny import make_hf_dir, make_moe_hf_dir

BUCKET = 4000  # elements; megatron-core's are of 40 million
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [("tied", {}), ("tied", {"cp": 2}), ("moe", {"ep": 2})],
    4: [
        ("tied", {"tp": 2, "sp": True}),
        ("tied", {"pp": 2}),
        ("tied", {"pp": 2, "vp": 2}),
        ("moe", {"ep": 2, "tp": 2, "sp": True}),
    ],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    make_hf_dir(directory / "tied", tied=True, num_hidden_layers=4)
    make_moe_hf_dir(directory / "moe", num_hidden_layers=4)
    return directory


@contextmanager
def small_buckets() -> Iterator[None]:
    whole = policy_module.DistributedDataParallelConfig
    policy_module.DistributedDataParallelConfig = partial(whole, bucket_size=BUCKET)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        policy_module.DistributedDataParallelConfig = whole  # type: ignore[misc]


def gradients(path: Path, sizes: dict[str, Any], *, overlap: bool) -> tuple[dict[str, Tensor], int]:
    """Gradients of the third pass, and the number of sums in flight when its backward ended."""
    with layout(**sizes) as parallel, small_buckets():
        policy = load_policy(path, parallel, ParallelConfig(overlap_grad_reduce=overlap))
        for number in range(3):
            policy.zero_grad()
            batches = make_batches()[parallel.dp_rank :: parallel.dp_size]
            batches = batches[:1] if number == 0 else batches  # buckets must wait for the last one, however many
            run_schedule(policy, batches, weighted_logprob_loss(policy))
            groups = [
                group for chunk in policy.chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
            ]
            begun = sum(group.grad_reduce_handle is not None for group in groups)
            if overlap:
                finish_overlapped_grads(policy)
            else:
                reduce_model_parallel_grads(policy)
                reduce_data_parallel_grads(policy)
        assert not overlap or begun == len(groups), "every sum had begun"
        return whole_gradients(policy), begun


def both(models: Path) -> list[Any]:
    return [
        [gradients(models / model, sizes, overlap=overlap) for overlap in (False, True)]
        for model, sizes in CASES[dist.get_world_size()]
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_same_gradient_summed_during_backward(world_size: int, models: Path) -> None:
    ranks = run_ranks(both, world_size, models)
    for rank in ranks:
        for case, ((expected, none), (found, begun)) in zip(CASES[world_size], rank, strict=True):
            assert none == 0 and begun >= (2 if rank is ranks[0] else 1), case  # later stages have one bucket
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                assert_close(found[name], gradient, (case, name))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two steps have no reward."""
    return make_inputs(tmp_path_factory.mktemp("inputs"), tied=True, worthless=2)


NORMLESS = ("algo.baseline=rloo", "algo.snr.estimator=momentum")
OVERLAP = "parallel.overlap_grad_reduce=true"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((OVERLAP,), ("model.dtype=float64",)),
        ((OVERLAP, "parallel.use_distributed_optimizer=true"), ()),
    ],
    ids=["fp64", "sharded"],
)
def test_a_run_is_the_run_without(
    inputs: Path, tmp_path: Path, options: tuple[str, ...], told: tuple[str, ...]
) -> None:
    """Two replicas: all logged metrics and the weights."""
    told = (*NORMLESS, "algo.snr.num_folds=4", "num_steps=5", *told)
    train(config_of(inputs, tmp_path / "plain", *told), 2)
    train(config_of(inputs, tmp_path / "overlap", *options, *told), 2)
    runs = [certain(tmp_path / name) for name in ("plain", "overlap")]
    assert len(runs[0]) == len(runs[1]) == 5
    assert [record["grad_norm"] > 0 for record in runs[1]] == [False] * 2 + [True] * 3
    assert math.isfinite(runs[0][-1]["snr/signal_sq"])
    for expected, found in zip(*runs, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-7, nan_ok=True)
    weights = [exported(tmp_path / name) for name in ("plain", "overlap")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-5, msg=name)
