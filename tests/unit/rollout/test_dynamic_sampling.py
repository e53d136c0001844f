"""Dynamic sampling on random rewards: the groups of a step, their places, and the metrics.

Not covered: real engines and ranks (tests/e2e/test_replay.py), the bias of the estimates (docs/samples.md).
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oblr_megatron.algo.baseline import mixed_groups
from oblr_megatron.engine.protocol import call_seed, prompt_seed
from oblr_megatron.evaluation.answers import SEED_OFFSET
from oblr_megatron.rollout.dynamic_sampling import Batch, next_size, refill
from oblr_megatron.types import Prompt, Sample, Scored

G = 3


def batch_of(rows: range, rewards: list[tuple[float, ...]]) -> Batch:
    """Prompts of some rows, with G responses that name their row."""
    prompts = [Prompt(row, str(row), "", (row,), "", "") for row in rows]
    samples = [
        Sample(group, (row,), (row, member), (-1.0, -2.0), "", "stop", 0)
        for group, row in enumerate(rows)
        for member in range(G)
    ]
    table = torch.tensor([rewards[row] for row in rows], dtype=torch.float64)
    return Batch(prompts, samples, Scored(table, torch.tensor([[row] * G for row in rows]), failures=len(rows)))


class Stream:
    """Yields prompts in order and records the batch sizes; rewards are given by row."""

    def __init__(self, rewards: list[tuple[float, ...]]) -> None:
        self.rewards, self.taken, self.sizes = rewards, 0, []

    def draw(self, count: int, batch: int) -> Batch:
        assert batch == len(self.sizes), "batches are numbered in order"
        self.sizes.append(count)
        self.taken += count
        return batch_of(range(self.taken - count, self.taken), self.rewards)


rewards_of_a_group = st.one_of(
    st.sampled_from([(0.0,) * G, (1.0,) * G]), st.tuples(*[st.sampled_from([0.0, 0.5, 1.0])] * G)
)


@given(num_prompts=st.integers(1, 6), max_batches=st.integers(1, 5), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_step_is_the_first_mixed_groups_of_the_stream(num_prompts, max_batches, seed, data):
    size = num_prompts * max_batches
    rewards = data.draw(st.lists(rewards_of_a_group, min_size=size, max_size=size))
    stream = Stream(rewards)
    first = stream.draw(num_prompts, 0)
    result = refill(first, stream.draw, max_batches=max_batches, seed=seed)
    rows = [prompt.row for prompt in result.step.prompts]
    is_mixed = [len(set(rewards[row])) > 1 for row in range(stream.taken)]

    found = [row for row in range(stream.taken) if is_mixed[row]][:num_prompts]
    assert sorted(row for row in rows if is_mixed[row]) == found, "in the order of the data"
    assert len(found) == num_prompts or result.batches == max_batches, (
        "a place keeps its group only after the budget is spent"
    )
    assert all(rows[place] == place for place in range(num_prompts) if is_mixed[place] or rows[place] < num_prompts)
    assert len(set(rows)) == num_prompts

    assert [sample.group for sample in result.step.samples] == [place for place in range(num_prompts) for _ in range(G)]
    assert [sample.response_ids for sample in result.step.samples] == [(row, g) for row in rows for g in range(G)]
    assert result.step.scored.rewards.tolist() == [list(rewards[row]) for row in rows]
    assert result.step.scored.lengths.tolist() == [[row] * G for row in rows]

    assert result.rewards.tolist() == [list(group) for group in rewards[: stream.taken]]
    assert result.step.scored.failures == stream.taken
    assert result.batches == len(stream.sizes) <= max_batches and max(stream.sizes) <= num_prompts
    assert result.unused == sum(is_mixed) - len(found)
    assert num_prompts + result.dropped + result.unused == stream.taken


def test_nothing_is_drawn_when_all_groups_are_mixed():
    stream = Stream([(0.0, 1.0, 0.0)] * 4)
    first = stream.draw(4, 0)
    result = refill(first, stream.draw, max_batches=4, seed=0)
    assert result.step.samples == first.samples
    assert result.metrics() == {"rollout/dynamic_batches": 1, "groups/dropped": 0, "groups/unused": 0}


def test_places_are_filled_in_random_order():
    """One replacement for four equal places: each place gets it equally often, so no fold is worse off."""
    rewards = [(1.0,) * G] * 7 + [(0.0, 1.0, 0.0)]
    filled: Counter[int] = Counter()
    for seed in range(400):
        stream = Stream(rewards)
        result = refill(stream.draw(4, 0), stream.draw, max_batches=2, seed=seed)
        filled[[prompt.row for prompt in result.step.prompts].index(7)] += 1
    assert all(70 < filled[place] < 130 for place in range(4)), filled  # 100 expected, standard deviation 8.7


@pytest.mark.parametrize(
    ("missing", "mixed_so_far", "sampled", "most", "expected"),
    [(3, 16, 64, 64, 12), (1, 63, 64, 64, 2), (60, 4, 64, 64, 64), (64, 0, 64, 64, 64), (1, 1, 1, 8, 1)],
)
def test_size_of_the_next_batch(missing, mixed_so_far, sampled, most, expected):
    assert next_size(missing, mixed=mixed_so_far, sampled=sampled, most=most) == expected


def test_mixed():
    assert mixed_groups(torch.tensor([[0.0, 0.0], [0.0, 0.1], [1.0, 1.0]])).tolist() == [False, True, False]


def test_seeds_of_all_calls_of_a_run_differ():
    steps, batches = (0, 1, 2, 999_999), range(5)
    training = [call_seed(7, step, batch) for step, batch in itertools.product(steps, batches)]
    evaluation = [call_seed(7, SEED_OFFSET + first) for first in range(0, 5000, 64)]
    assert len({*training, *evaluation}) == len(training) + len(evaluation)
    assert prompt_seed(call_seed(7, 3, 0), 0) != prompt_seed(call_seed(7, 3, 1), 0)
    assert call_seed(7, 3) == call_seed(7, 3, batch=0) == 7 * 1_000_003 + 3, "recorded runs depend on it"
