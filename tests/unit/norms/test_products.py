"""The selection of the cheaper method, and the memory of both. Not covered: CUDA.

test_segments.py tests their results.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oblr_megatron.norms.products import CPU_TILES, GPU_TILES, batch_sq_norms, cheaper
from tests.unit.norms.segment_cases import tiles

SHAPES = [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936), (4096, 24576), (12288, 4096), (1, 9)]


class LargestResult(TorchDispatchMode):
    """Records the size of the largest tensor that an operation creates; views do not count."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", [CPU_TILES, GPU_TILES])
def test_gram_is_selected_up_to_one_length(shape, sizes):
    selected = [cheaper(t, *shape, sizes) for t in range(1, 60_000, 7)]
    first_direct = selected.index("direct")
    assert set(selected[:first_direct]) <= {"gram"} and set(selected[first_direct:]) == {"direct"}


@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_the_crossover_is_where_the_flops_are_equal(shape):
    """t = 2pd / (p + d) - strip, within the cost of squaring: the products of 64 tokens."""
    d, p = shape
    expected = 2 * p * d / (p + d) - CPU_TILES.strip
    assert cheaper(round(expected - 64), d, p, CPU_TILES) == "gram"
    assert cheaper(round(expected + 64), d, p, CPU_TILES) == "direct"


@pytest.mark.parametrize("method", ["direct", "gram"])
def test_memory_is_that_of_tiles(method):
    """Tiles of 16 x 16 and strips of 4 tokens: at most 256 entries; gradients have 4,000, Gram matrices 3,600."""
    x, dy = torch.randn(3, 60, 50), torch.randn(3, 60, 80)
    with tiles(side=16, strip=4, call_flops=0), LargestResult() as largest:
        batch_sq_norms(x, dy, method)
    assert 0 < largest.numel <= 16 * 16


def test_a_norm_of_tokens_that_cancel_is_not_negative():
    """One input for all tokens, and output gradients with the sum 0: rounding decides the sign of the Gram form."""
    random = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(1, 1, 24, generator=random).expand(1, 16, 24)
        dy = torch.randn(1, 16, 32, generator=random)
        assert float(batch_sq_norms(x, dy - dy.mean(1, keepdim=True), "gram")) >= 0


def test_factors_of_two_dtypes_are_refused():
    with pytest.raises(AssertionError, match="float64"):
        batch_sq_norms(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, dtype=torch.float64))
