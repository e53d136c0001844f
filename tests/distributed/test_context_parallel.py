"""Sequences cut over ranks: each rank's gradient is a summand of the whole one.

fp64, 1e-10; lengths that nothing divides, repeated tokens, a sample without response.

Not covered: reduced gradients and other layouts (test_gradients.py), packed samples (test_packed.py), experts,
Transformer Engine's attention, which cuts sequences the same way.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.sequence import local_part
from oblr_megatron.model.step import reduce_data_parallel_grads, run_schedule
from oblr_megatron.norms.reduce import Reducer
from oblr_megatron.norms.rules import Kind, Rule
from oblr_megatron.padding import Padding
from oblr_megatron.types import MicroBatch
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import (
    COEFFICIENTS,
    TEMPERATURE,
    load_policy,
    make_batches,
    weighted_logprob_loss,
    whole_gradients,
)
from tests.oracle import load_oracle, oracle_gradients
from tests.tiny import make_hf_dir


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("models") / "untied")


def unreduced_gradients(path: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients without the reduction inside a replica, and the sums of log-probs of each sample."""
    with layout(cp=2) as parallel:
        policy = load_policy(path, parallel)
        records = run_schedule(policy, make_batches(), weighted_logprob_loss(policy))
        reduce_data_parallel_grads(policy)
        return whole_gradients(policy), [record["sums"] for record in records]


def test_each_ranks_gradient_and_metrics_are_summands(path: Path) -> None:
    """Left alone, every parameter of the two ranks together has half of the whole gradient (see the reduction)."""
    reference = oracle_gradients(load_oracle(path), make_batches(), COEFFICIENTS, TEMPERATURE)
    ranks = run_ranks(unreduced_gradients, 2, path)
    for gradients, _ in ranks:
        for name, gradient in gradients.items():
            torch.testing.assert_close(2 * gradient, reference[name], rtol=1e-10, atol=1e-12)
    [(_, expected)] = run_ranks(whole_sums, 1, path)
    for first, second, whole in zip(ranks[0][1], ranks[1][1], expected, strict=True):
        torch.testing.assert_close(first + second, whole, rtol=1e-12, atol=1e-12)


def whole_sums(path: Path) -> tuple[None, list[Tensor]]:
    with layout() as parallel:
        policy = load_policy(path, parallel)
        records = run_schedule(policy, make_batches(), weighted_logprob_loss(policy), forward_only=True)
        return None, [record["sums"] for record in records]


def parts_of_a_row() -> list[list[int]]:
    with layout(cp=2) as parallel:
        return [_part(parallel, length) for length in (8, 5, 1)]


def _part(parallel: Parallel, length: int) -> list[int]:
    row = torch.arange(1, length + 1)[None]
    batch = MicroBatch(row, row, row > 0, row.float(), torch.tensor([0]))
    part = local_part(parallel, batch, Padding.of(tp_size=1, cp_size=2, sequence_parallel=False))
    assert torch.equal(part.input_ids, part.labels)
    assert torch.equal(part.mask, part.input_ids > 0)
    return part.input_ids[0].tolist()


def test_the_cut_is_megatrons() -> None:
    """An early and a late chunk on each rank; padding is the end of the sequence."""
    first, second = run_ranks(parts_of_a_row, 2)
    assert first == [[1, 2, 7, 8], [1, 2, 0, 0], [1, 0]]
    assert second == [[3, 4, 5, 6], [3, 4, 5, 0], [0, 0]]


def share_of_a_sum(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's gradient before and after the sum over ranks, and its share of the sum."""
    with layout(cp=2) as parallel:
        grad = torch.arange(9.0).view(shape) * (1 + parallel.cp_rank)
        before = grad.clone()
        rule = Rule("linear", torch.nn.Parameter(torch.zeros(shape)), Kind.SHARD)
        return before, grad, Reducer(parallel).complete(rule, grad)


@pytest.mark.parametrize("shape", [(9,), (3, 3)])
def test_shares_of_a_sum_cover_it_once(shape: tuple[int, ...]) -> None:
    """Also where the ranks do not divide the number of elements. The caller's gradient stays as it is."""
    ranks = run_ranks(share_of_a_sum, 2, shape)
    assert all(torch.equal(before, after) for before, after, _ in ranks)
    assert torch.cat([share for *_, share in ranks]).tolist() == [3.0 * n for n in range(9)] + [0.0]
