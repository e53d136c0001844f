"""Rejection by importance ratio against the definition, evaluated response by response in Python.

Not covered: norms and gradients of what stays (tests/distributed/test_corrections.py).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oblr_megatron.algo.rejection import kept_tokens

INF = math.inf
LEVELS = ("none", "token", "sequence", "geometric")


def by_definition(logprobs, rollout, mask, level, low, high):
    """Kept tokens, responses that lost one, responses with a token."""
    kept, lost, samples = [], 0, 0
    for row, rollout_row, mask_row in zip(logprobs, rollout, mask, strict=True):
        each = [math.exp(p - m) for p, m in zip(row, rollout_row, strict=True)]
        own = [ratio for ratio, on in zip(each, mask_row, strict=True) if on]
        if level == "sequence":
            each = [math.prod(own)] * len(each)
        if level == "geometric" and own:
            each = [math.prod(own) ** (1 / len(own))] * len(each)
        inside = [level == "none" or low <= ratio <= high for ratio in each]
        kept.append([on and ok for on, ok in zip(mask_row, inside, strict=True)])
        lost += kept[-1] != list(mask_row)
        samples += bool(own)
    return kept, lost, samples


def away_from_the_band(logprobs, rollout, mask, level, low, high):
    """Whether no ratio is so near an end of the band that rounding decides."""
    ends = (low, high)
    for row, rollout_row, mask_row in zip(logprobs, rollout, mask, strict=True):
        logs = [p - m for p, m, on in zip(row, rollout_row, mask_row, strict=True) if on]
        total = sum(logs)
        found = {"token": logs, "sequence": [total], "geometric": [total / max(1, len(logs))]}.get(level, [])
        if any(abs(math.exp(value) - end) < 1e-9 for value in found for end in ends):
            return False
    return True


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_kept_is_the_definition(data):
    rows, columns = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 6))
    table = st.lists(st.lists(st.floats(-3, 0), min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    logprobs, rollout = data.draw(table), data.draw(table)
    mask = [[data.draw(st.booleans()) for _ in range(columns)] for _ in range(rows)]
    level = data.draw(st.sampled_from(LEVELS))
    low, high = data.draw(st.floats(0, 1)), data.draw(st.floats(1, 4))
    if not away_from_the_band(logprobs, rollout, mask, level, low, high):
        return
    keep, lost, samples = kept_tokens(
        torch.tensor(logprobs, dtype=torch.float64).view(rows, columns),
        torch.tensor(rollout, dtype=torch.float64).view(rows, columns),
        torch.tensor(mask, dtype=torch.bool).view(rows, columns),
        level=level,
        low=low,
        high=high,
    )
    wanted, wanted_lost, wanted_samples = by_definition(logprobs, rollout, mask, level, low, high)
    assert keep.tolist() == wanted
    assert (float(lost), float(samples)) == ((wanted_lost, wanted_samples) if level != "none" else (0, 0))


@pytest.mark.parametrize(
    ("logprob", "drawn", "kept"),
    [
        pytest.param(-1.0, -INF, False, id="impossible-for-the-engine"),
        pytest.param(-INF, -1.0, False, id="impossible-for-the-trainer"),
        pytest.param(-INF, -INF, True, id="impossible-for-both"),
        pytest.param(math.nan, -1.0, True, id="a-broken-model-is-not-hidden"),
    ],
)
@pytest.mark.parametrize("level", LEVELS[1:])
def test_one_odd_token_among_others(level, logprob, drawn, kept):
    """It decides about itself, or about the whole response."""
    logprobs = torch.tensor([[logprob, -1.0]], dtype=torch.float64)
    rollout = torch.tensor([[drawn, -1.0]], dtype=torch.float64)
    keep, _, _ = kept_tokens(logprobs, rollout, torch.ones(1, 2, dtype=torch.bool), level=level, low=0.1, high=9.0)
    assert keep.tolist() == [[kept, kept or level == "token"]]


def random_rows():
    """Three rows of 6 tokens, one without a response."""
    generator = torch.Generator().manual_seed(0)
    logprobs, rollout = -torch.rand(2, 3, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 6, generator=generator) < 0.6
    mask[1], mask[0, :2] = False, True
    return logprobs, rollout, mask


BANDS = {"token": (0.75, 1.6), "sequence": (0.85, 4.0), "geometric": (0.95, 1.5)}


@pytest.mark.parametrize("level", BANDS)
def test_packed_samples_lose_what_rows_lose(level):
    logprobs, rollout, mask = random_rows()
    lengths, (low, high) = [4, 6, 5], BANDS[level]
    mask[0, 4:] = mask[2, 5:] = False
    expected, lost, samples = kept_tokens(logprobs, rollout, mask, level=level, low=low, high=high)
    assert 0 < int(expected.sum()) < int(mask.sum()), "some stay, some go"
    packed = [
        torch.cat([row[:length] for row, length in zip(values, lengths, strict=True)])[None]
        for values in (logprobs, rollout, mask, expected)
    ]
    offsets = torch.tensor([0, 4, 10, 15], dtype=torch.int32)
    keep, *counts = kept_tokens(*packed[:3], level=level, low=low, high=high, cu_seqlens=offsets)
    assert torch.equal(keep, packed[3]) and counts == [lost, samples]


@pytest.mark.parametrize("level", BANDS)
def test_ranks_that_share_samples_lose_what_whole_ones_lose(level):
    """Two halves of every row; `reduce` adds both halves' sums, call by call."""
    whole, (low, high) = random_rows(), BANDS[level]
    expected, lost, samples = kept_tokens(*whole, level=level, low=low, high=high)
    halves = [[values[:, :3] for values in whole], [values[:, 3:] for values in whole]]
    calls: list[list[torch.Tensor]] = []
    while True:  # each round finds the inputs of one more call
        found, done = [], []
        for half in halves:
            seen: list[torch.Tensor] = []

            def collect(sums, seen=seen):
                seen.append(sums)
                place = len(seen) - 1
                return sum(calls[place]) if place < len(calls) else sums

            done.append(kept_tokens(*half, level=level, low=low, high=high, reduce=collect, ranks=2))
            found.append(seen)
        if len(calls) == len(found[0]):
            break
        calls.append([seen[len(calls)] for seen in found])
    assert torch.equal(torch.cat([keep for keep, _, _ in done], dim=1), expected)
    assert sum(float(part) for _, part, _ in done) == float(lost)
    assert sum(float(part) for _, _, part in done) == float(samples)
