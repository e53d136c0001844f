"""The split of prompts over servers: every prompt is sampled once, tokens are balanced, and losses are handled.

Not covered: requests to real servers (tests/e2e/test_servers.py).
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oblr_megatron.rollout.balance import MOST_PROMPTS, Balance


def fill(balance: Balance) -> list:
    tasks = []
    while (task := balance.next()) is not None:
        tasks.append(task)
    return tasks


def test_equal_prompts_are_split_evenly():
    balance = Balance([100] * 64, [1000, 1000], sequences=8)
    fill(balance)
    assert balance.outstanding(0) == balance.outstanding(1) == 3200


def test_few_prompts_go_to_all_servers():
    balance = Balance([100] * 4, [1000, 1000], sequences=8)
    assert {task.server for task in fill(balance)} == {0, 1}


def test_the_server_with_the_fewest_tokens_outstanding_is_next():
    balance = Balance([1000, 10, 10, 10, 10], [64, 64], sequences=1)
    tasks = fill(balance)
    assert tasks[0].server == 0 and 0 in tasks[0].items
    assert all(task.server == 1 for task in tasks[1:])


def test_a_full_server_gets_no_more_until_it_has_answered():
    balance = Balance([1] * 40, [16], sequences=8)
    (first,) = fill(balance)
    assert first.items == (0, 1), "16 sequences are two prompts of 8"
    balance.finish(first)
    assert fill(balance)[0].items == (2, 3)


def test_a_prompt_with_more_sequences_than_a_server_decodes_at_once_is_still_sent():
    balance = Balance([1] * 3, [16], sequences=64)
    assert [task.items for task in fill(balance)] == [(0,)]


def test_a_lost_servers_prompts_come_next():
    balance = Balance([1] * 8, [4, 4], sequences=1)
    tasks = fill(balance)
    lost = [task for task in tasks if task.server == 0]
    balance.lose(0)
    assert balance.next() is None, "the other one is full"
    for task in tasks:
        if task.server == 1:
            balance.finish(task)
    again = fill(balance)
    assert {task.server for task in again} == {1}
    assert sorted(item for task in again for item in task.items) == sorted(item for task in lost for item in task.items)
    for task in lost:
        with pytest.raises(KeyError):
            balance.finish(task)
    for task in again:
        balance.finish(task)
    assert balance.finished


def test_a_batch_that_is_used_prompt_by_prompt_is_asked_for_prompt_by_prompt():
    balance = Balance([1] * 4, [64], sequences=1, together=1)
    assert [task.items for task in fill(balance)] == [(0,), (1,), (2,), (3,)]


def test_without_servers_nothing_is_sent():
    assert Balance([1], [0, 0], sequences=1).next() is None
    assert Balance([1], [], sequences=1).next() is None
    assert Balance([], [4], sequences=1).finished


@given(
    costs=st.lists(st.integers(1, 1000), max_size=60),
    capacities=st.lists(st.integers(1, 64), min_size=1, max_size=5),
    sequences=st.integers(1, 16),
    seed=st.integers(0, 2**32),
)
def test_every_prompt_is_finished_once_under_any_order_of_answers_and_losses(costs, capacities, sequences, seed):
    draw = random.Random(seed)
    balance = Balance(costs, capacities, sequences)
    running, finished = [], []
    while not balance.finished and any(balance._capacities):
        tasks = fill(balance)
        assert all(1 <= len(task.items) <= MOST_PROMPTS for task in tasks)
        running += tasks
        assert running or not any(balance._capacities), "there is work unless all servers are lost"
        if draw.random() < 0.2 or not running:
            server = draw.randrange(len(capacities))
            balance.lose(server)
            running = [task for task in running if task.server != server]
        else:
            task = running.pop(draw.randrange(len(running)))
            balance.finish(task)
            finished += task.items
    assert len(set(finished)) == len(finished)
    assert not balance.finished or sorted(finished) == list(range(len(costs)))


def test_a_task_that_is_finished_twice_is_refused():
    balance = Balance([1], [8], sequences=1)
    (task,) = fill(balance)
    balance.finish(task)
    with pytest.raises(KeyError):
        balance.finish(task)
