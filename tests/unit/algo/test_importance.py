"""Truncated importance ratios against the definition, evaluated term by term in Python.

Not covered: their use in the loss (test_loss.py), the size of real mismatches (tests/e2e).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oblr_megatron.algo.importance import truncated_ratios

INF = math.inf


def by_definition(logprobs, rollout, mask, level, cap):
    """rho and the number of truncated ratios, in Python floats without infinities."""
    ratios, cut = [], 0
    for row, rollout_row, mask_row in zip(logprobs, rollout, mask, strict=True):
        product = math.prod(math.exp(p - m) for p, m, on in zip(row, rollout_row, mask_row, strict=True) if on)
        each = [product if level == "sequence" else math.exp(p - m) for p, m in zip(row, rollout_row, strict=True)]
        each = [1.0] * len(each) if level == "none" else each
        cut += sum(ratio > cap and on for ratio, on in zip(each, mask_row, strict=True))
        ratios.append([min(ratio, cap) if on else 0.0 for ratio, on in zip(each, mask_row, strict=True)])
    return ratios, cut


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_ratios_are_the_definition(data):
    rows, columns = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 6))
    values = st.floats(-8, 0)
    table = st.lists(st.lists(values, min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    logprobs, rollout = data.draw(table), data.draw(table)
    mask = [[data.draw(st.booleans()) for _ in range(columns)] for _ in range(rows)]
    level = data.draw(st.sampled_from(["none", "token", "sequence"]))
    cap = data.draw(st.floats(1, 5))
    ratios, cut = truncated_ratios(
        torch.tensor(logprobs, dtype=torch.float64).view(rows, columns),
        torch.tensor(rollout, dtype=torch.float64).view(rows, columns),
        torch.tensor(mask, dtype=torch.bool).view(rows, columns),
        level=level,
        cap=cap,
    )
    expected, expected_cut = by_definition(logprobs, rollout, mask, level, cap)
    torch.testing.assert_close(ratios, torch.tensor(expected, dtype=torch.float64).view(rows, columns))
    assert int(cut) == expected_cut


@pytest.mark.parametrize(
    ("logprob", "rollout", "ratio", "cut"),
    [
        pytest.param(-1.0, -INF, 2.0, 1, id="impossible-for-the-engine"),
        pytest.param(-INF, -1.0, 0.0, 0, id="impossible-for-the-trainer"),
        pytest.param(-INF, -INF, 1.0, 0, id="impossible-for-both"),
        pytest.param(-1.0, -1.0 - math.log(2), 2.0, 0, id="exactly-the-cap"),
    ],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_infinities_of_a_single_token(level, logprob, rollout, ratio, cut):
    one = torch.ones(1, 1, dtype=torch.bool)
    ratios, number = truncated_ratios(
        torch.tensor([[logprob]], dtype=torch.float64),
        torch.tensor([[rollout]], dtype=torch.float64),
        one,
        level=level,
        cap=2.0,
    )
    assert ratios.item() == pytest.approx(ratio) and int(number) == cut


def test_a_sequence_with_probability_zero_under_both_policies_has_ratio_zero():
    ratios, cut = truncated_ratios(
        torch.tensor([[-1.0, -INF]]),
        torch.tensor([[-INF, -1.0]]),
        torch.ones(1, 2, dtype=torch.bool),
        level="sequence",
        cap=2.0,
    )
    assert ratios.tolist() == [[0.0, 0.0]] and int(cut) == 0


def test_nan_stays_nan_and_ratios_have_no_gradient():
    logprobs = torch.tensor([[math.nan, -1.0]], requires_grad=True)
    ratios, _ = truncated_ratios(
        logprobs, torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool), level="token", cap=2.0
    )
    assert ratios.isnan().tolist() == [[True, False]] and not ratios.requires_grad


def test_values_outside_the_mask_do_not_matter():
    mask = torch.tensor([[False, True]])
    ratios, cut = truncated_ratios(
        torch.tensor([[math.nan, -1.0]]), torch.tensor([[0.0, -1.5]]), mask, level="sequence", cap=9.0
    )
    torch.testing.assert_close(ratios, torch.tensor([[0.0, math.exp(0.5)]]))
    assert int(cut) == 0


def random_rows():
    """Three rows of 6 tokens: one without a response, one with probability zero under the trainer."""
    generator = torch.Generator().manual_seed(0)
    logprobs, rollout = -torch.rand(2, 3, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 6, generator=generator) < 0.6
    mask[1] = False
    mask[2, 3], logprobs[2, 3] = True, -INF
    return logprobs, rollout, mask


def test_packed_samples_have_the_ratios_of_rows():
    logprobs, rollout, mask = random_rows()
    lengths = [4, 6, 5]
    mask[0, 4:] = mask[2, 5:] = False
    expected, cut = truncated_ratios(logprobs, rollout, mask, level="sequence", cap=1.1)
    packed = [
        torch.cat([row[:length] for row, length in zip(values, lengths, strict=True)])[None]
        for values in (logprobs, rollout, mask, expected)
    ]
    offsets = torch.tensor([0, 4, 10, 15], dtype=torch.int32)
    ratios, packed_cut = truncated_ratios(*packed[:3], level="sequence", cap=1.1, cu_seqlens=offsets)
    torch.testing.assert_close(ratios, packed[3], rtol=1e-14, atol=0)
    assert int(packed_cut) == int(cut)


def test_ranks_that_share_samples_have_the_ratios_of_whole_ones():
    """Two halves of every row; `reduce` adds both halves' sums."""
    whole = random_rows()
    expected, cut = truncated_ratios(*whole, level="sequence", cap=1.1)
    halves = [[values[:, :3] for values in whole], [values[:, 3:] for values in whole]]
    sums = []

    def collect(totals):
        sums.append(totals)
        return totals

    for half in halves:
        truncated_ratios(*half, level="sequence", cap=1.1, reduce=collect)
    results = [
        truncated_ratios(*half, level="sequence", cap=1.1, reduce=lambda _: sums[0] + sums[1]) for half in halves
    ]
    torch.testing.assert_close(torch.cat([ratios for ratios, _ in results], dim=1), expected, rtol=1e-14, atol=0)
    assert sum(int(number) for _, number in results) == int(cut)
