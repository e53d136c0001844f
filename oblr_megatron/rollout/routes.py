"""Routes of samples on their way to the ranks that train on them (model.moe_routing_replay).

Routes are large: 48 layers x 8 experts x 2 bytes = 768 bytes a token for Qwen3-30B-A3B. Every rank gets every sample,
but only the rank that talks to an engine gets the routes of that engine's samples. All ranks hold the samples in the
same order, so a position in that list names the routes. Before a gradient, each rank asks for those that it lacks:

    samples = with_routes(samples, wanted, collectives, seconds=60)       # collective; `wanted` differs between ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from oblr_megatron.errors import BrokenStepError
from oblr_megatron.runtime.collectives import Collectives
from oblr_megatron.types import Sample


def without_routes(samples: Sequence[Sample]) -> list[Sample]:
    """The samples as other ranks get them."""
    return [sample if sample.routes is None else replace(sample, routes=None) for sample in samples]


def with_routes(
    samples: Sequence[Sample], wanted: Iterable[int], collectives: Collectives, *, seconds: float
) -> list[Sample]:
    """The samples; those that are wanted have their routes.

    Args:
        samples: the same on every rank, but for their routes.
        wanted: positions of samples that this rank trains on; may be empty.

    Raises:
        BrokenStepError: on all ranks, if no rank has the routes of a wanted sample.
        DeadlineError: a rank missed the deadline.
    """
    held = np.array([n for n, sample in enumerate(samples) if sample.routes is not None], np.int32)
    lacked = np.array([n for n in wanted if samples[n].routes is None], np.int32)
    shapes = {sample.routes.shape[1:] for sample in samples if sample.routes is not None}
    what = "routes of samples"
    asked: list[tuple[NDArray[np.int32], NDArray[np.int32], set[tuple[int, ...]]]] = collectives.objects(
        (held, lacked, shapes), what=what, seconds=seconds
    )
    shapes = set().union(*(own_shapes for _, _, own_shapes in asked))
    owners = {n: rank for rank, (has, _, _) in reversed(list(enumerate(asked))) for n in has.tolist()}
    missing = sorted({n for _, lacks, _ in asked for n in lacks.tolist()} - owners.keys())
    if missing or len(shapes) > 1:
        raise BrokenStepError(f"samples {missing[:10]} have no routes" if missing else f"routes have shapes {shapes}")
    result = list(samples)
    arriving: list[tuple[int, torch.Tensor]] = []
    for n in lacked.tolist():
        sample = samples[n]
        routes = np.empty((sample.num_tokens, *next(iter(shapes))), np.int16)
        arriving.append((owners[n], torch.from_numpy(routes)))
        result[n] = replace(sample, routes=routes)
    leaving = [
        (rank, torch.from_numpy(np.require(samples[n].routes, requirements=("C", "W"))))
        for rank, (_, lacks, _) in enumerate(asked)
        for n in lacks.tolist()
        if owners[n] == collectives.rank
    ]
    collectives.exchange(leaving, arriving, what=what, seconds=seconds)
    return result
