"""Microbatches and folds.

Oracle: a microbatch is converted back into samples, token by token, and compared with the input. Not covered: that the
loss does not depend on the packing, which needs a model (tests/distributed).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.data.packing import balanced_shares, check_folds, local_folds, microbatches, one_per_microbatch, pack
from oblr_megatron.errors import UserError
from oblr_megatron.padding import Padding, padding_of
from oblr_megatron.types import MicroBatch, Sample


def sample(prompt: int, response: int, first: int = 1, mask: tuple[bool, ...] = ()) -> Sample:
    """A sample with distinct tokens; the log-prob of token t is -t."""
    tokens = tuple(range(first, first + prompt + response))
    logprobs = tuple(-float(token) for token in tokens[prompt:])
    return Sample(0, tokens[:prompt], tokens[prompt:], logprobs, "", "stop", 0, mask)


def test_only_what_the_policy_wrote_is_trained_on() -> None:
    """The other tokens stay in the input; places in the response count the policy's tokens alone."""
    samples = [sample(2, 5, mask=(True, True, False, False, True)), sample(1, 2, first=20, mask=(False, False))]
    for packed in (False, True):
        [batch] = map(as_rows, pack(samples, [0, 1], max_tokens=100, packed=packed))
        assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6], [20, 21, 0, 0, 0, 0]]
        assert batch.mask.tolist() == [[False, True, True, False, False, True], [False] * 6]
        assert batch.rollout_logprobs.tolist() == [[0, -3, -4, 0, 0, -7], [0] * 6]
        assert batch.token_index.tolist() == [[0, 0, 1, 0, 0, 2], [0] * 6]
    assert [one.length for one in samples] == [3, 0] and [one.turns for one in samples] == [2, 0]


def as_rows(batch: MicroBatch) -> MicroBatch:
    """A packed microbatch with one sample in each row."""
    if batch.cu_seqlens is None:
        return batch
    assert batch.cu_seqlens.dtype == torch.int32
    assert len(batch.input_ids) == 1
    assert batch.token_index is not None
    fields = (batch.input_ids, batch.labels, batch.mask, batch.rollout_logprobs, batch.token_index)
    lengths = batch.cu_seqlens.diff().tolist()
    *rows, index = (pad_sequence(values[0].split(lengths), batch_first=True) for values in fields)
    return MicroBatch(*rows, batch.sample_index, token_index=index)


def unpack(batch: MicroBatch) -> dict[int, tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """Sample index -> (input tokens, response, log-probs), as the loss reads them."""
    found = {}
    batch = as_rows(batch)
    for ids, labels, mask, logprobs, index in zip(
        batch.input_ids, batch.labels, batch.mask, batch.rollout_logprobs, batch.sample_index, strict=True
    ):
        assert not logprobs[~mask].any()
        follows = mask[:-1] & mask[1:]
        assert torch.equal(ids[1:][follows], labels[:-1][follows]), "a label is the next token"
        found[int(index)] = (tuple(ids.tolist()), tuple(labels[mask].tolist()), tuple(logprobs[mask].tolist()))
    return found


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 8)), max_size=12),
    st.integers(1, 40),
    st.integers(1, 4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_all_samples_are_packed_within_the_token_budget(shapes, max_tokens, pad_multiple, packed, random) -> None:
    samples = [sample(*shape, first=1 + 20 * index) for index, shape in enumerate(shapes)]
    chosen = random.sample(range(len(samples)), random.randint(0, len(samples)))
    batches = pack(samples, chosen, max_tokens=max_tokens, pad_multiple=pad_multiple, packed=packed)
    found = {index: row for batch in batches for index, row in unpack(batch).items()}
    assert sorted(index for batch in batches for index in batch.sample_index.tolist()) == sorted(chosen)
    for index in chosen:
        ids, response, logprobs = found[index]
        expected = inputs(samples[index])
        assert ids[: len(expected)] == expected and not any(ids[len(expected) :])
        assert response == samples[index].response_ids and logprobs == samples[index].logprobs
    for batch in batches:
        rows, width = batch.input_ids.shape
        assert batch.num_samples == 1 or rows * width <= max_tokens
        lengths = torch.tensor([width]) if batch.cu_seqlens is None else batch.cu_seqlens.diff()
        assert int(lengths.sum()) == width
        assert not (lengths % pad_multiple).any()
    longest = [len(inputs(samples[int(batch.sample_index[0])])) for batch in batches]
    assert longest == sorted(longest, reverse=True), "the longest come first"


def inputs(one: Sample) -> tuple[int, ...]:
    """All tokens but the last one, which predicts nothing; a prompt of one token without a response stays."""
    tokens = one.prompt_ids + one.response_ids
    return tokens[:-1] or tokens


def test_packing_is_first_fit() -> None:
    samples = [sample(1, response) for response in (3, 9, 4, 4)]
    batches = pack(samples, [0, 1, 2, 3], max_tokens=12, packed=True)
    assert [batch.sample_index.tolist() for batch in batches] == [[1, 0], [2, 3]]
    assert [batch.cu_seqlens.tolist() for batch in batches] == [[0, 9, 12], [0, 4, 8]]
    rows = pack(samples, [0, 1, 2, 3], max_tokens=12)
    assert [batch.sample_index.tolist() for batch in rows] == [[1], [2, 3, 0]]


def test_packing_follows_the_configuration() -> None:
    samples = [sample(1, response) for response in (3, 9, 4, 4)]
    options = ParallelConfig(packing="packed", context_parallel_size=2, micro_batch_tokens=16)
    batches = microbatches(samples, [0, 1, 2, 3], options, padding_of(ModelConfig(path="."), options))
    assert [batch.cu_seqlens.tolist() for batch in batches] == [[0, 12, 16], [0, 4, 8]]
    rows = microbatches(samples, [0, 1, 2, 3], ParallelConfig(micro_batch_tokens=16), Padding())
    assert [tuple(batch.input_ids.shape) for batch in rows] == [(1, 9), (3, 4)]


@pytest.mark.parametrize("packed", [False, True])
def test_routes_lie_next_to_their_tokens(packed: bool) -> None:
    """-1 for padding and for a sample without routes; nothing at all if no sample of the microbatch has any."""
    routes = np.arange(5 * 3 * 2, dtype=np.int16).reshape(5, 3, 2)
    samples = [replace(sample(2, 3), routes=routes), sample(1, 2, first=20), sample(1, 8, first=40)]
    alone, both = pack(samples, [0, 1, 2], max_tokens=8, pad_multiple=4, packed=packed)
    assert alone.routes is None and both.routes is not None
    assert both.routes.dtype == torch.int16 and both.routes.shape == (*both.input_ids.shape, 3, 2)
    found = both.routes.flatten(0, 1)
    assert torch.equal(found[:4], torch.from_numpy(routes[:4])) and bool((found[4:] == -1).all())


def test_routes_have_a_row_for_each_token() -> None:
    with pytest.raises(AssertionError, match="routes"):
        pack([replace(sample(2, 3), routes=np.zeros((4, 1, 1), dtype=np.int16))], [0], max_tokens=9)


def test_one_per_microbatch_keeps_the_order() -> None:
    samples = [sample(2, 5), sample(2, 0), sample(1, 2)]
    batches = one_per_microbatch(samples, [2, 0, 1])
    assert [batch.sample_index.tolist() for batch in batches] == [[2], [0], [1]]
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(1, 2), (1, 6), (1, 1)]
    assert not batches[2].mask.any(), "an empty response has no masked-in position"


def test_a_sample_needs_a_prompt_and_a_logprob_for_each_token() -> None:
    with pytest.raises(AssertionError, match="prompt"):
        pack([sample(0, 3)], [0], max_tokens=9)
    with pytest.raises(AssertionError, match="log-prob"):
        pack([Sample(0, (1,), (2, 3), (-0.1,), "", "stop", 0)], [0], max_tokens=9)


@pytest.mark.parametrize(("prompts", "folds", "ranks"), [(8, 4, 1), (8, 4, 2), (8, 4, 4), (6, 6, 3), (5, 1, 1)])
def test_folds_cover_the_prompts_in_order(prompts: int, folds: int, ranks: int) -> None:
    shares = [local_folds(prompts, folds, rank, ranks) for rank in range(ranks)]
    assert [position for share in shares for fold in share for position in fold] == list(range(prompts))
    assert {len(share) for share in shares} == {folds // ranks}
    assert {len(fold) for share in shares for fold in share} == {prompts // folds}


@pytest.mark.parametrize(("folds", "ranks"), [(4, 3), (2, 4)])
def test_uneven_folds_are_an_error(folds: int, ranks: int) -> None:
    with pytest.raises(UserError, match=f"{folds} folds are not a multiple of the data-parallel size {ranks}") as error:
        check_folds(folds, ranks)
    assert error.value.where == "config: algo.snr.num_folds"
    check_folds(folds, folds)


@pytest.mark.parametrize(
    ("tokens", "shares", "dealt"),
    [
        ([9, 1, 5, 5], 2, [[0, 1], [2, 3]]),
        ([4, 4, 4, 4], 2, [[0, 2], [1, 3]]),
        ([100, 1, 1, 1], 2, [[0, 3], [1, 2]]),  # equal counts come first
        ([3, 2, 1], 2, [[0], [1, 2]]),
        ([7], 3, [[0], [], []]),
        ([], 2, [[], []]),
    ],
)
def test_shares_of_equal_count_and_nearly_equal_tokens(tokens: list[int], shares: int, dealt: list[list[int]]) -> None:
    assert balanced_shares(tokens, shares) == dealt


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pad_multiple", [1, 4])
def test_of_tokens_gathers_the_value_of_each_token(packed: bool, pad_multiple: int) -> None:
    """The table [N, T] holds the log-probs, so gathering must reproduce `rollout_logprobs`."""
    samples = [sample(2, 3, first=10), sample(1, 0, first=20), sample(4, 6, first=30), sample(1, 1, first=50)]
    table = torch.zeros(len(samples), 6, dtype=torch.float64)
    for n, one in enumerate(samples):
        table[n, : len(one.response_ids)] = torch.tensor(one.logprobs)
    batches = pack(samples, [3, 0, 1, 2], max_tokens=14, pad_multiple=pad_multiple, packed=packed)
    assert len(batches) > 1
    for batch in [*batches, *one_per_microbatch(samples, [2, 0])]:
        assert torch.equal(batch.of_tokens(table), batch.rollout_logprobs.double())
