"""`account_for_embedding_and_loss`: the first and the last stage hold one layer less than the others.

6 layers in 4 parts of 1, 2, 2 and 1: four stages, or two stages of two chunks. A whole step equals the oracle's:
each of the two has every second norm mode, and the nightly tests have all. Exported weights, and those of a distributed
checkpoint, are bit for bit the loaded ones.

Not covered: a mixture, more than 4 ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from oblr_megatron.checkpoint.convert import to_hf
from oblr_megatron.checkpoint.distributed import TorchDistWriter, load_weights, training_state
from oblr_megatron.config import OptimizerConfig, ParallelConfig
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.weights.export import MegatronWeights
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import load_policy
from tests.distributed.test_gradnorm_modes import FULL, NIGHTLY, PACKED, check, expected, on_ranks
from tests.tiny import make_hf_dir

ENDS = {"account_for_embedding_and_loss": True}
LAYOUTS: dict[int, tuple[dict[str, Any], list[set[int]]]] = {  # ranks: sizes, layers of each rank
    2: ({"pp": 2, "vp": 2}, [{0, 3, 4}, {1, 2, 5}]),
    4: ({"pp": 4}, [{0}, {1, 2}, {3, 4}, {5}]),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(
        tmp_path_factory.mktemp("six") / "model", tied=True, seed=8, num_hidden_layers=6, dtype=torch.float64
    )


@NIGHTLY
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_mode_is_the_oracles_step(world_size: int, model: Path, nightly: bool) -> None:
    options = PACKED | FULL if world_size == 2 else {}
    cases = {"short ends": (LAYOUTS[world_size][0], ENDS | options)}
    turn = None if nightly else world_size // 2
    check(expected(str(model)), run_ranks(on_ranks, world_size, str(model), cases, turn, True))


def saved(path: Path, sizes: dict[str, Any], target: Path) -> tuple[set[int], dict[str, Tensor], bool]:
    """Layers of this rank, the gathered weights, and whether a checkpoint gives them back."""
    with layout(**sizes) as parallel:
        policy = load_policy(path, parallel, ParallelConfig(**ENDS))
        weights = {name: tensor.clone() for name, tensor in MegatronWeights(policy)}
        if parallel.rank == 0:
            target.mkdir()
        dist.barrier()
        state = training_state(policy, PolicyOptimizer(policy, OptimizerConfig()))
        TorchDistWriter(dist.new_group(backend="gloo"), parallel).stage(state, target)()
        dist.barrier()
        own = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
        for _, parameter in policy.named_parameters():
            parameter.data.zero_()
        load_weights(policy, target)
        same = all(torch.equal(parameter, own[name]) for name, parameter in policy.named_parameters())
        return {int(name.split(".")[2]) for name in own if "layers" in name}, weights, same


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_weights_come_back_bit_for_bit(world_size: int, model: Path, tmp_path: Path) -> None:
    sizes, layers = LAYOUTS[world_size]
    source = load_file(model / "model.safetensors")
    ranks = run_ranks(saved, world_size, model, sizes, tmp_path / "checkpoint")
    assert [held for held, _, _ in ranks] == layers
    assert all(same for _, _, same in ranks)
    for _, weights, _ in ranks:
        assert weights.keys() == source.keys() - {"lm_head.weight"}
        assert all(torch.equal(tensor, source[name]) for name, tensor in weights.items())
    to_hf(tmp_path / "checkpoint", tmp_path / "hf", hf_source=model, max_shard_bytes=10**9)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(tensor, source[name]) for name, tensor in found.items())
