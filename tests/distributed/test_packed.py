"""Packed samples are cut over ranks with their bounds.

Not covered: their logits and gradients (test_gradients.py), how samples are chosen (tests/unit/data), experts.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from oblr_megatron.model.sequence import local_part
from oblr_megatron.padding import Padding
from oblr_megatron.types import MicroBatch
from tests.distributed.launch import layout, run_ranks


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
