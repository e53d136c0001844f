"""One rank's accumulator: which gradients it squares, which it buffers, and the bytes of the buffers.

Gradients are random. Not covered: a real backward (tests/distributed), CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.data.packing import one_per_microbatch, pack
from oblr_megatron.model.parallel import initialize, shutdown
from oblr_megatron.model.policy import Policy, build_policy
from oblr_megatron.norms.accumulate import NormAccumulator, buffered_bytes
from oblr_megatron.norms.embedding_rows import touched_rows
from oblr_megatron.norms.reduce import Reducer
from oblr_megatron.norms.rules import Kind, Rule, classify
from oblr_megatron.types import MicroBatch, Sample
from tests.tiny import tiny_config

SAMPLES = [Sample(0, ids, (1,), (0.0,), "", "stop", 0) for ids in ((9, 3, 9, 15), (36, 5))]  # a pass reads the prompts


@pytest.fixture
def policy() -> Iterator[Policy]:
    parallel = initialize(ParallelConfig())
    config = ModelConfig(path=".", make_vocab_size_divisible_by=8)
    yield build_policy(tiny_config(tie_word_embeddings=True), config, parallel)
    shutdown()


def on_tp_rank(policy: Policy, tp_rank: int) -> tuple[list[Rule], NormAccumulator, list[MicroBatch]]:
    """The accumulator of a rank of TP 2, with shards, copies and partials."""
    parallel = replace(policy.parallel, tp_size=2, tp_rank=tp_rank)
    rules = classify(replace(policy, parallel=parallel))
    batches = one_per_microbatch(SAMPLES, (0, 1))
    return rules, NormAccumulator(rules, batches, Reducer(parallel)), batches


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_each_gradient_goes_where_its_rule_says(policy: Policy, tp_rank: int) -> None:
    rules, accumulator, _ = on_tp_rank(policy, tp_rank)
    generator = torch.Generator().manual_seed(0)
    counted, partials = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for slot in (1, 0):  # samples may end in any order
        for rule in rules:
            grad = torch.randn(rule.param.shape, generator=generator)
            accumulator.matrix(rule, slot, grad)
            if rule.kind is Kind.PARTIAL:
                partials[slot] += grad.double().square().sum()
            elif rule.kind is Kind.SHARD or tp_rank == 0:
                counted[slot] += grad.double().square().sum()
    torch.testing.assert_close(accumulator.own, counted, rtol=1e-12, atol=0)
    buffered = accumulator.vectors[Kind.PARTIAL].values.double().square().sum(1)
    torch.testing.assert_close(buffered, partials, rtol=1e-12, atol=0)


def test_vectors_of_several_samples_are_added_at_once(policy: Policy) -> None:
    rules, accumulator, _ = on_tp_rank(policy, 0)
    copy = next(rule for rule in rules if rule.kind is Kind.COPY)
    grads = torch.randn(2, *copy.param.shape, generator=torch.Generator().manual_seed(1))
    accumulator.vector(copy, 0, grads)
    torch.testing.assert_close(accumulator.own, grads.double().square().sum(1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_buffered_bytes_equal_the_buffers_sizes(policy: Policy, tp_rank: int) -> None:
    rules, accumulator, batches = on_tp_rank(policy, tp_rank)
    assert accumulator.rows is not None
    rows = [part for part in (accumulator.rows.embedding, accumulator.rows.head) if part is not None]
    held = accumulator.vectors[Kind.PARTIAL].values.nbytes + sum(part.nbytes for part in rows)
    assert len(rows) == 2  # a tied embedding: E and H
    assert sum(buffered_bytes(rules, batch, accumulator.parallel) for batch in batches) == held


def test_rows_are_found_by_sample_and_row(policy: Policy) -> None:
    _, accumulator, _ = on_tp_rank(policy, 0)
    rows = accumulator.rows
    assert rows is not None and rows.embedding is not None
    assert rows.sample.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert rows.row.tolist() == [0, 3, 9, 15, 0, 5, 36]
    assert rows.span(1, 2) == slice(4, 7)
    rows.add_embedding(torch.tensor([1, 0]), torch.tensor([36, 9]), torch.ones(2, 48))
    assert rows.embedding.sum(1).tolist() == [0, 0, 48, 0, 0, 0, 48]
    with pytest.raises(RuntimeError, match="no sample"):
        rows.add_embedding(torch.tensor([1]), torch.tensor([9]), torch.ones(1, 48))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("tp_rank", "expected"),
    [(0, [(0, 0), (0, 3), (1, 0)]), (1, [(0, 1), (0, 7), (1, 0)]), (2, [(1, 5)])],  # (sample, row); row 0 is padding
)
def test_touched_rows(packed: bool, tp_rank: int, expected: list[tuple[int, int]]) -> None:
    samples = [Sample(0, ids, (1,), (0.0,), "", "stop", 0) for ids in ((9, 3, 9, 15), (8, 21, 8, 8))]
    (batch,) = pack(samples, [0, 1], max_tokens=8, packed=packed)
    sample, row = touched_rows(batch, 8, tp_rank)
    assert list(zip(sample.tolist(), row.tolist(), strict=True)) == expected
