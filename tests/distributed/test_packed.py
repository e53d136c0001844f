"""Packed samples have the logits of single ones, and the gradients of transformers' autograd.

fp64, relative 1e-10, in tensor, sequence, context and pipeline parallel layouts; neighbours of equal length (which
share an attention call) and of different ones, lengths that nothing divides, a sample without response.

Does not cover: how samples are chosen (tests/unit/data), experts, Transformer Engine's attention.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.model.sequence import local_part
from oblr_megatron.types import MicroBatch
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import (
    COEFFICIENTS,
    TEMPERATURE,
    Outcome,
    assert_outcomes,
    load_policy,
    logits_by_position,
    make_batches,
    reduced_gradients,
)
from tests.oracle import exact_norms, load_oracle, oracle_gradients
from tests.tiny import make_hf_dir

ORDERS = [(0, 0, 1), (2, 3, 3), (1,)]  # samples of each microbatch; some go through more than once
LAYOUTS = {
    1: [{}],
    2: [{"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2}],
    4: [{"cp": 2, "tp": 2, "sp": True}, {"cp": 2, "pp": 2}, {"tp": 2, "pp": 2, "sp": True}],
}


def packed_batches() -> list[MicroBatch]:
    """The samples of `make_batches` behind one another."""
    return [packed([make_batches()[index] for index in order]) for order in ORDERS]


def packed(rows: list[MicroBatch]) -> MicroBatch:
    """One row of several microbatches of one sample each."""
    lengths = torch.tensor([0, *(row.input_ids.shape[1] for row in rows)])
    names = ("input_ids", "labels", "mask", "rollout_logprobs", "sample_index")
    fields = [torch.cat([getattr(row, name) for row in rows], dim=-1) for name in names]
    return MicroBatch(*fields, cu_seqlens=lengths.cumsum(0, dtype=torch.int32))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_hf_dir(root / "untied"), make_hf_dir(root / "tied", tied=True, num_key_value_heads=1, seed=1)]


def logits_in_layouts(path: Path) -> dict[str, list[tuple[Tensor, Tensor]] | None]:
    results = {}
    for sizes in LAYOUTS[dist.get_world_size()]:
        with layout(**sizes) as parallel:
            results[str(sizes)] = logits_by_position(load_policy(path, parallel), packed_batches())
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_logits_equal_those_of_single_samples(world_size: int, paths: list[Path]) -> None:
    ranks = run_ranks(logits_in_layouts, world_size, paths[0])
    model = load_oracle(paths[0])
    with torch.no_grad(), exact_norms():
        single = [model(batch.input_ids).logits for batch in make_batches()]
    for case in ranks[0]:
        for index, order in enumerate(ORDERS):
            expected = torch.cat([single[sample] for sample in order], dim=1)
            for rank in ranks:
                if rank[case] is not None:
                    positions, logits = rank[case][index]
                    real = positions > 0
                    torch.testing.assert_close(logits[:, real], expected[:, positions[real] - 1], rtol=0, atol=1e-10)


def gradients_in_layouts(paths: list[Path]) -> dict[str, Outcome]:
    results: dict[str, Outcome] = {}
    for sizes in LAYOUTS[dist.get_world_size()]:
        with layout(**sizes) as parallel:
            for path in paths[dist.get_world_size() // 4 :]:  # on 4 ranks the tied model only
                results[f"{path.name} {sizes}"] = reduced_gradients(load_policy(path, parallel), packed_batches())
    return results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradients_equal_transformers(world_size: int, paths: list[Path]) -> None:
    ranks = run_ranks(gradients_in_layouts, world_size, paths)
    samples = [make_batches()[index] for order in ORDERS for index in order]
    expected = {path.name: oracle_gradients(load_oracle(path), samples, COEFFICIENTS, TEMPERATURE) for path in paths}
    for case in ranks[0]:
        assert_outcomes([rank[case] for rank in ranks], expected[case.split()[0]], case)


def parts() -> list[tuple[list[int], list[int]]]:
    """For each layout this rank's tokens and its cu_seqlens."""
    row = torch.arange(1, 9)[None]
    batch = MicroBatch(row, row, row > 0, row.float(), torch.arange(3), torch.tensor([0, 5, 6, 8], dtype=torch.int32))
    results = []
    for sizes in ({"cp": 2}, {"tp": 2, "sp": True}):
        with layout(**sizes) as parallel:
            part = local_part(parallel, batch)
            assert part.cu_seqlens.dtype == torch.int32
            tokens, bounds = part.input_ids[0], part.cu_seqlens.tolist()
            owners = part.per_token(torch.arange(3))[0]
            assert [owners[start:stop].unique().tolist() for start, stop in pairwise(bounds)] == [[0], [1], [2]]
            sums = part.per_sample(part.input_ids.double())
            assert sums.tolist() == [float(tokens[start:stop].sum()) for start, stop in pairwise(bounds)]
            results.append((tokens.tolist(), bounds))
    return results


def test_each_sample_is_cut_and_the_tail_is_the_last_ones() -> None:
    first, second = run_ranks(parts, 2)
    assert first[0] == ([1, 2, 0, 0, 6, 0, 7, 0], [0, 4, 6, 8])
    assert second[0] == ([3, 4, 5, 0, 0, 0, 8, 0], [0, 4, 6, 8])
    assert first[1] == second[1] == ([1, 2, 3, 4, 5, 6, 7, 8], [0, 5, 6, 8])
