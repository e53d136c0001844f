"""Packed samples have the logits of single ones, in tensor, sequence, context and pipeline parallel layouts.

fp64, absolute 1e-10; neighbours of equal length (which share an attention call) and of different ones, lengths that
nothing divides, a sample without response.

Not covered: gradients (test_gradients.py), how samples are chosen (tests/unit/data), experts.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.model.sequence import local_part
from oblr_megatron.padding import Padding
from oblr_megatron.types import MicroBatch
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import ORDERS, load_policy, logits_by_position, make_batches, packed_batches
from tests.oracle import exact_norms, load_oracle
from tests.tiny import make_hf_dir

LAYOUTS = {
    1: [{}],
    2: [{"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2}],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("models") / "untied")


def logits_in_layouts(path: Path) -> dict[str, list[tuple[Tensor, Tensor]] | None]:
    results = {}
    for sizes in LAYOUTS[dist.get_world_size()]:
        with layout(**sizes) as parallel:
            results[str(sizes)] = logits_by_position(load_policy(path, parallel), packed_batches())
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_logits_equal_those_of_single_samples(world_size: int, path: Path) -> None:
    ranks = run_ranks(logits_in_layouts, world_size, path)
    model = load_oracle(path)
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


def parts() -> list[tuple[list[int], list[int]]]:
    """For each layout this rank's tokens and its cu_seqlens."""
    row = torch.arange(1, 9)[None]
    batch = MicroBatch(row, row, row > 0, row.float(), torch.arange(3), torch.tensor([0, 5, 6, 8], dtype=torch.int32))
    results = []
    for tp, cp in ((1, 2), (2, 1)):
        with layout(tp=tp, cp=cp, sp=tp > 1) as parallel:
            part = local_part(parallel, batch, Padding.of(tp_size=tp, cp_size=cp, sequence_parallel=tp > 1))
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
