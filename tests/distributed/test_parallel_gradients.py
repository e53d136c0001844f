"""The gradient of sum_n c_n sum_t log pi(o_t), whole and under Hugging Face names, equals transformers' autograd.

fp64, relative 1e-10, in every layout: tensor, sequence, pipeline and data parallel, tied and untied, fewer KV groups
than ranks; one sample a microbatch and several. A missing reduction can change a norm by as little as 2e-4, so the
tolerance matters; the last test drops each reduction in turn.

Does not cover: bf16 (test_optimizer.py), CUDA; context parallelism, packing, recomputation and the interleaved schedule
have tests of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.model.step import reduce_data_parallel_grads, reduce_model_parallel_grads, run_schedule
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import (
    COEFFICIENTS,
    TEMPERATURE,
    Outcome,
    assert_outcomes,
    load_policy,
    make_batches,
    reduced_gradients,
    weighted_logprob_loss,
    whole_gradients,
)
from tests.oracle import load_oracle, oracle_gradients
from tests.tiny import make_hf_dir

LAYOUTS = {
    1: [{}],
    2: [{"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {}],
    4: [{"tp": 4}, {"tp": 4, "sp": True}, {"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "sp": True}, {"tp": 2}, {"pp": 2}],
}


def gradients_in_layouts(paths: list[Path], attention: str) -> dict[str, Outcome]:
    """Gradients and squared norm by "model, layout, rows of a microbatch"."""
    results: dict[str, Outcome] = {}
    for sizes in LAYOUTS[dist.get_world_size()]:
        with layout(**sizes) as parallel:
            for path in paths:
                policy = load_policy(path, parallel, attention=attention)
                for rows in (1, 2):
                    results[f"{path.name} {sizes} {rows}"] = reduced_gradients(policy, make_batches(rows))
    return results


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [
        make_hf_dir(root / "untied"),
        make_hf_dir(root / "tied", tied=True, seed=1),
        make_hf_dir(root / "one_group", num_key_value_heads=1, seed=2),
    ]


@pytest.mark.parametrize(
    ("world_size", "attention"), [(1, "sdpa"), (1, "local"), (2, "sdpa"), (2, "local"), (4, "sdpa")]
)
def test_gradients_equal_transformers(world_size: int, attention: str, paths: list[Path]) -> None:
    ranks = run_ranks(gradients_in_layouts, world_size, paths, attention)
    expected = {
        path.name: oracle_gradients(load_oracle(path), make_batches(), COEFFICIENTS, TEMPERATURE) for path in paths
    }
    for case in ranks[0]:
        assert_outcomes([rank[case] for rank in ranks], expected[case.split()[0]], case)


def gradients_without(path: Path, reduction: str, sizes: dict[str, int]) -> dict[str, Tensor]:
    with layout(**sizes) as parallel:
        policy = load_policy(path, parallel)
        run_schedule(policy, make_batches()[parallel.dp_rank :: parallel.dp_size], weighted_logprob_loss(policy))
        if reduction != "model":
            reduce_model_parallel_grads(policy)
        if reduction != "data":
            reduce_data_parallel_grads(policy)
        return whole_gradients(policy)


@pytest.mark.parametrize(
    ("reduction", "sizes", "wrong"),
    [
        ("model", {"tp": 2}, {"q_norm", "k_norm"}),
        (
            "model",
            {"tp": 2, "sp": True},
            {"q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "model.norm"},
        ),
        ("model", {"pp": 2}, {"embed_tokens"}),
        ("data", {}, {"embed_tokens", "norm", "proj"}),
    ],
)
def test_each_reduction_is_needed(reduction: str, sizes: dict[str, int], wrong: set[str], paths: list[Path]) -> None:
    """Without it, exactly the parameters named have another gradient than the oracle's."""
    path = paths[1]  # tied
    reference = oracle_gradients(load_oracle(path), make_batches(), COEFFICIENTS, TEMPERATURE)
    for rank in run_ranks(gradients_without, 2, path, reduction, sizes):
        for name, gradient in rank.items():
            expected = reference[name.removeprefix("copy of ")]
            differs = bool((gradient - expected).abs().max() > 1e-10 * expected.abs().max())
            assert differs == any(part in name for part in wrong), name
