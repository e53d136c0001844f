"""Every sample of a step is on exactly one replica, each fold is whole, and tokens are as even as folds allow.

That gradients, norms and the folds' M are those of one rank is tested in tests/distributed.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oblr_megatron.data.packing import local_folds
from oblr_megatron.gradient.folds import Sharing
from oblr_megatron.types import Sample
from tests.live import step_config

Q, G, R = 16, 2, 8
TOKENS = [(position * 37) % 23 + 2 for position in range(Q)]  # of each response to a prompt


def sharing_of(rank: int, replicas: int, *, size: int = 1, one_sum: bool = False) -> Sharing:
    """The division as a replica sees it, without process groups."""
    sharing = Sharing.__new__(Sharing)
    parts: dict[str, Any] = {
        "_parallel": SimpleNamespace(dp_size=replicas, dp_rank=rank),
        "_group_size": G,
        "_num_prompts": Q,
        "num_folds": R,
        "one_sum": one_sum,
        "size": size,
        "rank": rank % size,
    }
    for name, value in parts.items():
        setattr(sharing, name, value)
    return sharing


def samples_at(positions: list[int]) -> list[Sample]:
    """G responses to each of these prompts."""
    return [
        Sample(position, (1,), (2,) * TOKENS[position], (-1.0,) * TOKENS[position], "", "stop", 0)
        for position in positions
        for _ in range(G)
    ]


def divided(replicas: int, positions: list[int], **options: Any) -> list[list[list[int]]]:
    """The folds of every replica, as positions of prompts; each as often as the replica has responses to it."""
    everything = torch.ones(len(positions), dtype=torch.bool)
    found = []
    for rank in range(replicas):
        sharing = sharing_of(rank, replicas, **options)
        folds = sharing.folds(positions, samples_at(positions), everything)
        assert all(fold == sorted(fold) for fold in folds)
        found.append([[positions[n // G] for n in fold] for fold in folds])
    return found


LAYOUTS: list[dict[str, Any]] = [
    {"replicas": 1},
    {"replicas": 4},
    {"replicas": 8},
    {"replicas": 4, "size": 2},
    {"replicas": 4, "one_sum": True},
    {"replicas": 4, "one_sum": True, "size": 2},
    {"replicas": 3, "one_sum": True},
]


@pytest.mark.parametrize("positions", [list(range(Q)), [0, 3, 4, 9, 15]], ids=["whole", "part"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_sample_is_on_one_replica(layout: dict[str, Any], positions: list[int]) -> None:
    found = divided(**layout, positions=positions)
    counts = Counter(chain.from_iterable(chain.from_iterable(found)))
    assert counts == dict.fromkeys(positions, G)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "one_sum" not in layout], ids=str)
def test_folds_stay_whole_and_keep_their_prompts(layout: dict[str, Any]) -> None:
    """The replicas that share a fold have all of it, and each has the same number of folds."""
    found, shared = divided(**layout, positions=list(range(Q))), layout.get("size", 1)
    folds = []
    for first in range(0, layout["replicas"], shared):
        block = found[first : first + shared]
        assert {len(own) for own in block} == {R * shared // layout["replicas"]}
        folds += [sorted(set(chain(*parts))) for parts in zip(*block, strict=True)]
    assert sorted(folds) == [list(fold) for fold in local_folds(Q, R, 0, 1)]


def test_the_busiest_replica_has_fewer_tokens_than_by_position() -> None:
    by_position = max(sum(TOKENS[at : at + 4]) for at in range(0, Q, 4))
    most = {}
    for name, one_sum in (("folds", False), ("prompts", True)):
        found = divided(4, list(range(Q)), one_sum=one_sum)
        most[name] = max(sum(TOKENS[position] for position in chain(*own)) for own in found) / G
    assert sum(TOKENS) / 4 <= most["prompts"] <= most["folds"] < by_position


def test_a_part_of_a_step_leaves_folds_where_their_sums_are() -> None:
    """Whatever the lengths: the same prompts are on the same replica in every part."""
    parts = [divided(4, part) for part in ([0, 5, 6, 11], [1, 2, 3, 4, 7, 8, 9, 10, 12, 13, 14, 15])]
    for rank in range(4):
        own = [list(fold) for fold in local_folds(Q, R, rank, 4)]
        for part in parts:
            assert all(set(found) <= set(fold) for found, fold in zip(part[rank], own, strict=True))


def test_inactive_groups_are_left_out_and_move_nobody() -> None:
    active = torch.ones(Q, dtype=torch.bool).index_fill_(0, torch.tensor([2, 3, 7]), False)
    for rank in range(4):
        sharing, samples = sharing_of(rank, 4), samples_at(list(range(Q)))
        every = sharing.folds(range(Q), samples, torch.ones(Q, dtype=torch.bool))
        some = sharing.folds(range(Q), samples, active)
        assert some == [[n for n in fold if active[n // G]] for fold in every]


def test_an_estimator_without_folds_makes_one_sum() -> None:
    config = step_config(8, prompts=Q, algo={"snr": {"estimator": "momentum", "num_folds": 4}})
    parallel: Any = SimpleNamespace(block_size=1, dp_rank=0, dp_size=1)
    sharing = Sharing(parallel, config)
    samples = [sample for sample in samples_at(list(range(Q)))[::G] for _ in range(config.group_size)]
    folds = sharing.folds(range(Q), samples, torch.ones(Q, dtype=torch.bool))
    assert folds == [list(range(len(samples)))] and sharing.num_folds == sharing.folds_of_a_rank == 1
