"""Per-sample weight gradients and norms against autograd, one sample at a time.

Not covered: CUDA, where matrix units take half-precision factors directly.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oblr_megatron.norms.products import product
from oblr_megatron.norms.segments import (
    Segments,
    product_rows,
    product_sq_norms,
    row_grads,
    sample_products,
    scale_grads,
)
from tests.unit.norms.segment_cases import Case, cases, linear_grads, stacked, tiles, weight_grad

METHODS = ("auto", "direct", "gram")
widths = st.integers(1, 9)
drawn = settings(deadline=None, max_examples=80)


def close(actual, expected, rtol=1e-12):
    """Equal up to rounding, relative to the largest entry, because entries of a gradient can cancel."""
    assert actual.shape == expected.shape
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=rtol, atol=rtol * max(scale, 1e-30))


def factors(case: Case, d: int, p: int):
    """x [t, b, d] and dy [t, b, p]."""
    return case.factor(d, salt=1, zero_padding=False), case.factor(p, salt=2, zero_padding=True)


@drawn
@given(
    case=cases(),
    d=widths,
    p=widths,
    method=st.sampled_from(METHODS),
    side=st.integers(1, 12),
    strip=st.integers(1, 6),
    call_flops=st.sampled_from([0, 200, 10**9]),
    viewed=st.sampled_from([1, 2, 10]),
)
def test_product_sq_norms(case, d, p, method, side, strip, call_flops, viewed):
    x, dy = factors(case, d, p)
    with tiles(side, strip, call_flops, viewed):
        norms = product_sq_norms(case.laid_out(x), case.laid_out(dy), case.segments, method=method)
    assert norms.dtype == torch.float64
    close(norms, stacked([grad.square().sum() for grad in linear_grads(case, x, dy)]))


@drawn
@given(case=cases(), d=widths, p=widths)
def test_sample_products(case, d, p):
    x, dy = factors(case, d, p)
    made = [(i, grad.clone()) for i, grad in sample_products(case.laid_out(x), case.laid_out(dy), case.segments)]
    assert [i for i, _ in made] == list(range(len(case.lengths)))
    close(stacked([grad for _, grad in made], p, d), stacked(linear_grads(case, x, dy), p, d))


@drawn
@given(case=cases(), h=widths, heads=st.one_of(st.none(), st.integers(1, 3)))
def test_scale_grads(case, h, heads):
    """The gradient of an RMSNorm's weight, for hidden states and for heads."""
    width = (h,) if heads is None else (heads, h)
    hidden, dy = case.factor(width, salt=1, zero_padding=False), case.factor(width, salt=2, zero_padding=True)
    x_hat = hidden * hidden.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
    expected = []
    for i in range(len(case.lengths)):
        hidden_i, dy_i = case.sample(hidden, i), case.sample(dy, i)
        expected.append(
            weight_grad((h,), lambda w, x=hidden_i, y=dy_i: (torch.nn.functional.rms_norm(x, (h,), w, 1e-6) * y).sum())
        )
    close(scale_grads(case.laid_out(x_hat * dy), case.segments), stacked(expected, h))


@drawn
@given(case=cases(), h=widths, vocab=st.integers(1, 6), here=st.floats(0, 1))
def test_row_grads(case, h, vocab, here):
    """Every sample's embedding gradient at the rows of its tokens; other ranks hold some tokens."""
    dy = case.factor(h, salt=1, zero_padding=True)
    generator = torch.Generator().manual_seed(case.seed)
    rows = torch.randint(vocab, dy.shape[:2], generator=generator)
    rows[torch.rand(rows.shape, generator=generator) > here] = -1
    sample, row, grad = touched_rows(rows.t(), dy.transpose(0, 1), case.segments)

    touched = torch.stack([sample, row], dim=1)
    close(touched, torch.unique(touched, dim=0))  # sorted, each pair once
    for i in range(len(case.lengths)):
        rows_i, dy_i = case.sample(rows[..., None], i)[:, 0], case.sample(dy, i)
        held = rows_i >= 0
        expected = weight_grad(
            (vocab, h), lambda w, r=rows_i[held], y=dy_i[held]: (torch.nn.functional.embedding(r, w) * y).sum()
        )
        whole = torch.zeros(vocab, h, dtype=torch.float64)
        whole[row[sample == i]] = grad[sample == i]
        close(whole, expected)
        assert set(rows_i[held].tolist()) <= set(row[sample == i].tolist())


def touched_rows(rows, dy, segments):
    """`row_grads` without the zeros at its end, which take the place of further tokens of the same row."""
    samples = segments.index(rows.shape[1], rows.device).expand(rows.shape[1], len(rows))
    pairs = {pair for pair in zip(samples.flatten().tolist(), rows.t().flatten().tolist(), strict=True) if pair[1] >= 0}
    parts = row_grads(rows, dy, segments)
    assert not any(part[len(pairs) :].any() for part in parts)
    return [part[: len(pairs)] for part in parts]


@drawn
@given(case=cases(), d=widths, p=widths, count=st.integers(0, 8), side=st.integers(1, 12))
def test_product_rows(case, d, p, count, side):
    x, dy = factors(case, d, p)
    generator = torch.Generator().manual_seed(case.seed)
    count = count if case.lengths else 0
    sample = torch.randint(max(1, len(case.lengths)), (count,), generator=generator).sort().values
    row = torch.randint(p, (count,), generator=generator)
    with tiles(side, strip=6, call_flops=0):
        made = product_rows(case.laid_out(x), case.laid_out(dy), case.segments, sample, row)
    close(made, stacked(linear_grads(case, x, dy), p, d)[sample, row])


def test_rows_of_a_tied_weight_make_its_cross_term():
    """||E + H||^2 = ||E||^2 + 2 <E, H> + ||H||^2, E and H the gradients of embedding and head."""
    case = Case(lengths=(4, 0, 6), packed=True, flat=False, seed=3)
    vocab, h = 5, 4
    x, dy = factors(case, h, vocab)
    looked_up = case.factor(h, salt=5, zero_padding=True)
    rows = torch.randint(vocab, (1, 10), generator=torch.Generator().manual_seed(1))
    sample, row, grads = touched_rows(rows, looked_up.transpose(0, 1), case.segments)
    head = product_rows(x, dy, case.segments, sample, row)
    norms = product_sq_norms(x, dy, case.segments)
    norms.index_add_(0, sample, (grads * (grads + 2 * head)).sum(1))
    expected = linear_grads(case, x, dy)
    for i, place in enumerate((slice(0, 4), slice(4, 4), slice(4, 10))):
        expected[i].index_add_(0, rows[0, place], looked_up[place, 0])
    close(norms, stacked([grad.square().sum() for grad in expected]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("spoilt_factor", ["x", "dy"])
def test_a_non_finite_sample_affects_only_its_own_norm(method, packed, bad, spoilt_factor):
    """Also if samples share one call, padded or not, in which 0 times infinity would give NaN."""
    case = Case(lengths=(3, 4, 4, 2), packed=packed, flat=False, seed=1)
    clean = dict(zip(("x", "dy"), factors(case, 6, 5), strict=True))
    spoilt = {name: factor.clone() for name, factor in clean.items()}
    case.sample(spoilt[spoilt_factor], 1)[2, 0] = bad
    others = torch.tensor([0, 2, 3])
    for call_flops, viewed in ((0, 10), (10**9, 10), (10**9, 1)):
        with tiles(side=64, strip=2, call_flops=call_flops, viewed=viewed):
            before = product_sq_norms(clean["x"], clean["dy"], case.segments, method=method)
            after = product_sq_norms(spoilt["x"], spoilt["dy"], case.segments, method=method)
        assert not after[1].isfinite()
        assert torch.equal(after[others], before[others])
    vectors = scale_grads(spoilt["dy"], case.segments)
    assert vectors[others].isfinite().all() and (spoilt_factor == "x" or not vectors[1].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("packed", [False, True])
def test_norms_of_narrow_factors(dtype, method, packed):
    """The accuracy of fp32 sums for any dtype: bf16 sums would have errors of 1e-3."""
    case = Case(lengths=(300, 90, 120, 1), packed=packed, flat=False, seed=5)
    x, dy = (factor.to(dtype) for factor in factors(case, 70, 50))
    exact = product_sq_norms(x.double(), dy.double(), case.segments, method="direct")
    norms = product_sq_norms(x, dy, case.segments, method=method)
    torch.testing.assert_close(norms, exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("method", "rtol"), [("direct", 2e-6), ("gram", 2e-4)])
def test_norms_of_tokens_that_cancel(dtype, method, rtol):
    """Pairs of tokens cancel except for a tenth of x: the norm is 1/500 of the sum of absolute terms."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(128, 1, width, generator=generator) for width in (200, 150))
    x = torch.cat([x, x + 0.1 * torch.randn(x.shape, generator=generator)]).to(dtype)
    dy = torch.cat([dy, -dy]).to(dtype)
    whole = Segments(1, None)
    exact = product_sq_norms(x.double(), dy.double(), whole, method="direct")
    norms = product_sq_norms(x, dy, whole, method=method)
    torch.testing.assert_close(norms, exact, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_gradients_of_narrow_factors(dtype):
    """Sums are fp32 for any dtype of the factors."""
    case = Case(lengths=(300, 40), packed=True, flat=False, seed=5)
    x, dy = (factor.to(dtype) for factor in factors(case, 8, 8))
    wide_x, wide_dy = x.double(), dy.double()
    close(scale_grads(dy, case.segments), scale_grads(wide_dy, case.segments).float(), 1e-6)
    rows = torch.zeros(1, len(x), dtype=torch.int64)
    (*_, made), (*_, exact) = (row_grads(rows, f.transpose(0, 1), case.segments) for f in (dy, wide_dy))
    close(made, exact.float(), 1e-6)
    sample, row = torch.tensor([0, 1, 1]), torch.tensor([3, 0, 7])
    rows_made, rows_exact = (product_rows(*f, case.segments, sample, row) for f in ((x, dy), (wide_x, wide_dy)))
    close(rows_made, rows_exact.float(), 1e-6)


@pytest.mark.parametrize("out_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_product_in_a_buffer_of_another_dtype(out_dtype):
    """A bf16 stash is rounded once, after the sum."""
    case = Case(lengths=(30,), packed=False, flat=False, seed=2)
    x, dy = (factor[:30, 0].float() for factor in factors(case, 6, 5))
    out = torch.full((5, 6), float("nan"), dtype=out_dtype)
    product(x, dy, out)
    torch.testing.assert_close(out, (dy.double().t() @ x.double()).to(out_dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("segments", "shape"),
    [(Segments(2, None), (4, 3, 5)), (Segments(2, None), (4, 5)), (Segments(1, (0, 3)), (4, 1, 5))],
)
def test_factors_of_other_samples_are_refused(segments, shape):
    factor = torch.zeros(shape)
    with pytest.raises(AssertionError, match="Segments"):
        product_sq_norms(factor, factor, segments)


@pytest.mark.parametrize("offsets", [(0, 2), (1, 2, 3), (0, 3, 2)])
def test_invalid_offsets_are_refused(offsets):
    with pytest.raises(AssertionError):
        Segments(2, offsets)


def test_rows_out_of_order_are_refused():
    factor = torch.zeros(3, 2, 4)
    with pytest.raises(AssertionError, match="sorted"):
        product_rows(factor, factor, Segments(2, None), torch.tensor([1, 0]), torch.tensor([0, 0]))
