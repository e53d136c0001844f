"""Chunked sums of squares against plain fp64 sums. Not covered: CUDA."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oblr_megatron.model import sq_norms as kernels
from oblr_megatron.model.sq_norms import row_dots, row_sq_norms, sq_norm

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(kernels, "CPU_SQUARE_CHUNK", 7)


@settings(deadline=None)
@given(numel=st.integers(0, 40), chunk=st.integers(1, 50), dtype=st.sampled_from(DTYPES))
def test_sq_norm_is_the_sum_of_squares(numel, chunk, dtype):
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CPU_SQUARE_CHUNK", chunk)
        total = sq_norm(flat)
    assert total.dtype == torch.float64 and total.shape == ()
    torch.testing.assert_close(total, flat.double().square().sum(), rtol=1e-14, atol=0)


def test_sq_norm_keeps_what_fp32_would_lose():
    """fp32 cannot represent 2^24 + 1: a sum of ones in fp32 would stop at 2^24."""
    flat = torch.ones(2**24 + 3, dtype=torch.float32)
    assert sq_norm(flat).item() == 2**24 + 3


def test_sq_norm_of_the_smallest_and_largest_fp32():
    flat = torch.tensor([1e-30, 3e38], dtype=torch.float32)
    assert sq_norm(flat[:1]).item() == pytest.approx(1e-60, rel=1e-6)
    assert sq_norm(flat).item() == pytest.approx(9e76, rel=1e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0), (1, 1), (5, 6), (4, 20)])
def test_rows(rows, columns, dtype):
    generator = torch.Generator().manual_seed(rows * columns)
    left, right = (torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(2))
    torch.testing.assert_close(row_sq_norms(left), left.double().square().sum(1), rtol=1e-14, atol=0)
    torch.testing.assert_close(row_dots(left, right), (left.double() * right.double()).sum(1), rtol=1e-13, atol=1e-15)
