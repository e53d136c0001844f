"""Divide GPUs between engines and trainer, for `rollout.overlap`.

found, request = best_split(request, "stream")
request.engine_gpus, found.plans[0].prediction.seconds
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from oblr_megatron.errors import UserError
from oblr_megatron.planner.request import Request
from oblr_megatron.planner.search import Found, search

MOST_SPLITS = 8


def best_split(request: Request, overlap: str) -> tuple[Found, Request]:
    """The division with the fastest step, and its layouts.

    Args:
        request: its `gpus` are those of trainer and engines together.
        overlap: rollout.overlap, "stream" or "one_step".

    Raises:
        UserError: no division is possible, or nothing fits in any; the message of the last one.
    """
    best: tuple[Found, Request] | None = None
    refusal = UserError("one GPU cannot train and sample at the same time", where="plan", fix="use two or more GPUs")
    for split in _splits(request, overlap):
        try:
            found = search(split)
        except UserError as error:
            refusal = error
            continue
        if best is None or found.plans[0].prediction.seconds < best[0].plans[0].prediction.seconds:
            best = found, split
    if best is None:
        raise refusal
    return best


def _splits(request: Request, overlap: str) -> Iterator[Request]:
    """Up to MOST_SPLITS - 1 divisions, in whole nodes where there are two or more."""
    node = request.machine.device.gpus_per_node
    unit = node if request.gpus >= 2 * node else 1
    rollout = {"overlap": overlap, "max_staleness": int(overlap == "one_step"), "sleep_level": 0}
    table = {**request.table, "rollout": {**request.table.get("rollout", {}), **rollout}}
    units = request.gpus // unit
    for engines in sorted({max(1, units * part // MOST_SPLITS) for part in range(1, MOST_SPLITS)}):
        if engines < units:
            trainer = request.gpus - engines * unit
            yield replace(request, gpus=trainer, engine_gpus=engines * unit, table=table)
