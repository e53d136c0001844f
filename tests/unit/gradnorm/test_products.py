"""The choice between the two ways, and that neither holds a whole gradient or Gram matrix. Not covered: CUDA.

Their results are tested through `segments`, in test_segments.py.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oblr_megatron.gradnorm.products import CPU_TILES, GPU_TILES, batch_sq_norms, cheaper
from tests.unit.gradnorm.segment_cases import tiles

SHAPES = [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936), (4096, 24576), (12288, 4096), (1, 9)]


class LargestResult(TorchDispatchMode):
    """Remembers the largest tensor that an operation makes, views of the factors aside."""

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
def test_the_gram_way_is_taken_up_to_one_length(shape, sizes):
    choices = [cheaper(t, *shape, sizes) for t in range(1, 60_000, 7)]
    first_direct = choices.index("direct")
    assert set(choices[:first_direct]) <= {"gram"} and set(choices[first_direct:]) == {"direct"}


@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_the_crossover_is_where_the_flops_are_equal(shape):
    """t = 2pd / (p + d) - strip, give or take what squaring costs: 64 tokens' worth of products."""
    d, p = shape
    expected = 2 * p * d / (p + d) - CPU_TILES.strip
    assert cheaper(round(expected - 64), d, p, CPU_TILES) == "gram"
    assert cheaper(round(expected + 64), d, p, CPU_TILES) == "direct"


@pytest.mark.parametrize("method", ["direct", "gram"])
def test_memory_is_that_of_tiles(method):
    """Tiles of 16 x 16, strips of 4 tokens: 256 entries, where the gradients have 4,000 and the Gram matrices 3,600."""
    x, dy = torch.randn(3, 60, 50), torch.randn(3, 60, 80)
    with tiles(side=16, strip=4, call_flops=0), LargestResult() as largest:
        batch_sq_norms(x, dy, method)
    assert 0 < largest.numel <= 16 * 16


def test_factors_of_two_dtypes_are_refused():
    with pytest.raises(AssertionError, match="float64"):
        batch_sq_norms(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, dtype=torch.float64))
