"""Projections against P dW Q^T; the mean and variance of their squared norms over seeds against the formulas.

Seeds are fixed, so that the bounds of four standard errors are deterministic. Not covered: CUDA.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oblr_megatron.norms.segments import Segments, product_sq_norms
from oblr_megatron.norms.sketch import Sketch
from tests.unit.norms.segment_cases import Case, cases, linear_grads, stacked

CPU = torch.device("cpu")
SEEDS = 3000


def sketch(p, d, size, seed=0, name="weight", dtype=torch.float64):
    return Sketch((p, d), size, seed, name, dtype, CPU)


def factors(case: Case, d: int, p: int):
    return case.factor(d, salt=1, zero_padding=False), case.factor(p, salt=2, zero_padding=True)


def projections(p, d, size, **of):
    """P [m, p] and Q [m, d], measured by projecting every unit matrix e_i e_j^T as a sample of one token."""
    dy = torch.eye(p, dtype=torch.float64).repeat_interleave(d, dim=0)
    x = torch.eye(d, dtype=torch.float64).repeat(p, 1)
    units = sketch(p, d, size, **of).project(x, dy, Segments(p * d, tuple(range(p * d + 1))))
    return units.unflatten(0, (p, d))  # [p, d, m, m]: the outer product of column i of P and column j of Q


@settings(deadline=None, max_examples=80)
@given(case=cases(), d=st.integers(1, 9), p=st.integers(1, 9), size=st.integers(1, 5))
def test_a_projection_is_p_dw_q(case, d, p, size):
    x, dy = factors(case, d, p)
    made = sketch(p, d, size).project(case.laid_out(x), case.laid_out(dy), case.segments)
    expected = torch.einsum("npd,pdab->nab", stacked(linear_grads(case, x, dy), p, d), projections(p, d, size))
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)


def test_entries_are_signs_over_sqrt_m():
    units = projections(5, 7, size=4)
    assert units.abs().unique().tolist() == [0.25]  # (1 / sqrt 4)^2
    assert 0 < (units > 0).float().mean() < 1


def test_projections_of_two_halves_of_a_sequence_sum_to_the_whole():
    case = Case(lengths=(10,), packed=True, flat=False, seed=4)
    x, dy = factors(case, 8, 6)
    whole = sketch(6, 8, 3).project(x, dy, case.segments)
    half = Segments(1, (0, 5))
    parts = [sketch(6, 8, 3).project(x[part], dy[part], half) for part in (slice(0, 5), slice(5, 10))]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-12, atol=1e-12)


def test_projections_depend_on_seed_and_name():
    assert torch.equal(projections(6, 6, 3), projections(6, 6, 3))
    for other in ({"seed": 1}, {"name": "another"}):
        assert not torch.equal(projections(6, 6, 3), projections(6, 6, 3, **other))


def estimates(x, dy, segments, size):
    """Squared norms [SEEDS, n], one sketch for each seed."""
    p, d = dy.shape[-1], x.shape[-1]
    return torch.stack(
        [sketch(p, d, size, seed).project(x, dy, segments).square().sum(dim=(1, 2)) for seed in range(SEEDS)]
    )


def gaussian_variance(grad, size):
    """The relative variance for a gradient [p, d] by the module's formula."""
    gram = grad @ grad.t()
    rank = gram.trace().square() / gram.square().sum()
    return 2 / size**2 + (4 / size + 2 / size**2) / rank


def sign_variance(grad, size):
    """The same for signs: E (v^T A v)^2 and E (g . v)^4 without the excess of Gaussians."""
    inputs, squares = grad.t() @ grad, grad.square()
    total, frobenius = squares.sum() ** 2, inputs.square().sum()
    off_diagonal = frobenius - inputs.diagonal().square().sum()
    half = (total + 2 * off_diagonal + (size - 1) * frobenius) / size  # E ||G Q^T Q G^T||^2
    rows = ((size + 2) * squares.sum(1).square() - 2 * squares.square().sum(1)).sum() / size  # its diagonal part
    return 2 / size * (half - rows + off_diagonal) / total


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("tokens", [1, 60])
def test_estimates_are_unbiased_with_the_derived_variance(size, tokens):
    """One token gives a gradient of rank 1, the worst case; 60 random tokens are close to the best case."""
    case = Case(lengths=(tokens, tokens), packed=True, flat=False, seed=7)
    x, dy = factors(case, 24, 32)
    ratios = estimates(x, dy, case.segments, size) / product_sq_norms(x, dy, case.segments)
    standard_error = ratios.std(dim=0) / SEEDS**0.5
    assert ((ratios.mean(dim=0) - 1).abs() < 4 * standard_error).all()
    for ratio, grad in zip(ratios.t(), linear_grads(case, x, dy), strict=True):
        expected, bound = sign_variance(grad, size), gaussian_variance(grad, size)
        assert expected <= bound <= 4 / size + 4 / size**2 + 1e-12
        squares = (ratio - 1).square()
        assert abs(squares.mean() - expected) < 4 * squares.std() / SEEDS**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_factors_are_projected_in_fp32(dtype):
    """Signs are exact in any dtype, so that factors and signs may have different dtypes."""
    case = Case(lengths=(200, 30), packed=False, flat=False, seed=3)
    x, dy = (factor.to(dtype) for factor in factors(case, 40, 30))
    made = sketch(30, 40, 8, dtype=dtype).project(x, dy, case.segments)
    exact = sketch(30, 40, 8).project(x.double(), dy.double(), case.segments)
    assert made.dtype == torch.float32
    assert (made - exact).abs().max() < 1e-6 * exact.abs().max()


@pytest.mark.parametrize("packed", [False, True])
def test_a_non_finite_sample_affects_only_its_own_projection(packed):
    case = Case(lengths=(3, 4, 2), packed=packed, flat=False, seed=1)
    x, dy = factors(case, 6, 5)
    case.sample(x, 1)[2, 0] = float("nan")
    finite = sketch(5, 6, 2).project(x, dy, case.segments).isfinite().all(dim=(1, 2))
    assert finite.tolist() == [True, False, True]
