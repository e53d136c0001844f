"""Routes of samples travel from the ranks that have them to those that train on them, and nowhere else.

Not covered: routes from an engine (tests/e2e/test_routes.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from oblr_megatron.errors import RunError
from oblr_megatron.rollout.routes import with_routes, without_routes
from oblr_megatron.runtime.collectives import Collectives
from oblr_megatron.types import Sample
from tests.distributed.launch import run_ranks

COUNT, WORLD = 11, 3
WANTED = (range(0, COUNT, 2), (), (8, 3, 1))  # by rank; sample 8 goes to two ranks


def samples_of(owners: list[int], rank: int) -> list[Sample]:
    """Samples of 3 to 5 tokens; each rank has the routes of its own."""
    draw, found = np.random.default_rng(0), []
    for n in range(COUNT):
        sample = Sample(n, (5,) * (1 + n % 3), (7, 1), (-0.1, -0.2), "", "stop", 0)
        routes = draw.integers(-1, 300, (len(sample.prompt_ids) + 2, 4, 2)).astype(np.int16)
        routes.setflags(write=n % 2 == 0)
        found.append(replace(sample, routes=routes) if owners[n] == rank else sample)
    return found


def on_rank(owners: list[int]) -> list[np.ndarray | None]:
    rank = dist.get_rank()
    samples = samples_of(owners, rank)
    result = with_routes(samples, WANTED[rank], Collectives(rank), seconds=60)
    assert result == samples
    return [sample.routes for sample in result]


@pytest.mark.parametrize("owners", [[n % WORLD for n in range(COUNT)], [0] * COUNT])
def test_each_rank_gets_what_it_wants(owners: list[int]) -> None:
    for rank, found in enumerate(run_ranks(on_rank, WORLD, owners)):
        expected = [samples_of([rank] * COUNT, rank)[n].routes for n in range(COUNT)]
        for n, routes in enumerate(found):
            if n in WANTED[rank] or owners[n] == rank:
                assert routes is not None and routes.dtype == np.int16 and np.array_equal(routes, expected[n])
            else:
                assert routes is None, "nobody asked for it"


def missing(owners: list[int]) -> str:
    with pytest.raises(RunError) as caught:
        on_rank(owners)
    return str(caught.value)


def test_all_ranks_raise_when_nobody_has_the_routes() -> None:
    owners = [n % WORLD for n in range(COUNT)]
    owners[8] = WORLD
    assert run_ranks(missing, WORLD, owners) == ["samples [8] have no routes"] * WORLD


def test_without_routes_leaves_the_rest() -> None:
    samples = samples_of([0] * COUNT, 0)
    bare = without_routes(samples)
    assert bare == samples and all(sample.routes is None for sample in bare)
