"""Lengths of packed samples stay on the host. Attention itself: tests/distributed/test_gradients.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oblr_megatron.model.cpu.attention import SdpaAttention
from oblr_megatron.model.sequence import PackedRows, packed_params
from oblr_megatron.model.transformer_config import _kernels
from oblr_megatron.types import MicroBatch


@pytest.mark.parametrize("cp", [1, 2])
def test_runs_of_equal_lengths_need_no_value_of_the_device(cp: int) -> None:
    on_device = torch.empty(5, dtype=torch.int32, device="meta")  # to read a value raises, as it would wait for a GPU
    packed = PackedRows(cu_seqlens_q=on_device, lengths=(4, 4, 8, 4))
    attention: Any = SimpleNamespace(cp_group=SimpleNamespace(size=lambda: cp))
    assert list(SdpaAttention._runs(attention, packed)) == [
        (0, 8 // cp, 2),
        (8 // cp, 16 // cp, 1),
        (16 // cp, 20 // cp, 1),
    ]


def test_lengths_are_those_of_whole_samples() -> None:
    parallel: Any = SimpleNamespace(cp_size=2)
    row = torch.zeros(1, 5)
    batch = MicroBatch(row, row, row, row, sample_index=row, cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32))
    packed = packed_params(parallel, batch, torch.device("cpu"))
    assert packed is not None and packed.lengths == (4, 6) and packed.max_seqlen_q == 6
    assert packed.cu_seqlens_q.tolist() == [0, 4, 10]


def test_rotary_embeddings_are_fused_only_by_transformer_engine() -> None:
    gpu = torch.device("cuda")
    fused = [_kernels(gpu, transformer_engine=engine)["apply_rope_fusion"] for engine in (False, True)]
    assert fused == [False, True]
