"""The result of a dry run as a table with one column per kind of rank, and as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from oblr_megatron.formatting import fixed, number
from oblr_megatron.preflight.device_memory import RankMemory
from oblr_megatron.preflight.models import Models, RankParameters

GB = 1e9


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks with equal memory. Example: RankKind(stages=(0,), ranks=(0, 1), parameters=298043392, trained=..., ...)"""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    parameters: int  # without adapters
    trained: int  # with a gradient
    memory: RankMemory


def kinds_of(models: Models, memory: Sequence[RankMemory]) -> list[RankKind]:
    """Group ranks by memory; pipeline stages with equal parts are one kind."""
    groups: dict[tuple[Any, ...], tuple[list[int], list[RankParameters]]] = {}
    for held in models.holdings:
        of_stage = memory[held.position.pp]
        key = (held.parameters, held.trained, *of_stage.parts().items(), of_stage.peak)
        stages, holdings = groups.setdefault(key, ([], []))
        stages.append(held.position.pp)
        holdings.append(held)
    return [
        RankKind(
            stages=tuple(dict.fromkeys(stages)),
            ranks=tuple(sorted(rank for held in holdings for rank in held.ranks)),
            parameters=key[0],
            trained=key[1],
            memory=memory[stages[0]],
        )
        for key, (stages, holdings) in groups.items()
    ]


def memory_table(kinds: Sequence[RankKind], device_bytes: int | None) -> Table:
    """GB (1e9 bytes) per rank and part; one column per kind of rank."""
    table = Table(title="memory per rank, GB (1e9 bytes)")
    table.add_column("")
    for kind in kinds:
        table.add_column(f"stage {span(kind.stages)}", justify="right")
    table.add_row("ranks", *(span(kind.ranks) for kind in kinds))
    table.add_row("parameters", *(number(kind.parameters) for kind in kinds))
    table.add_row("  trained", *(number(kind.trained) for kind in kinds), end_section=True)
    parts = [kind.memory.parts() for kind in kinds]
    training = [name for name, _ in kinds[0].memory.step.rows()]  # first, also those that the first stage lacks
    names = list(dict.fromkeys(name for part_bytes in parts for name in part_bytes))
    for name in sorted(names, key=lambda name: training.index(name) if name in training else len(training)):
        if name == "kept between steps":
            _add_training(table, kinds)
        table.add_row(name, *(fixed(part_bytes.get(name, 0) / GB, 2) for part_bytes in parts))
    if kinds[0].memory.engine is None:
        _add_training(table, kinds)
    else:
        table.add_row("while sampling", *(fixed(kind.memory.rollout / GB, 2) for kind in kinds), end_section=True)
        tokens = [kind.memory.engine.kv_tokens for kind in kinds if kind.memory.engine]
        table.add_row("tokens in an engine's KV cache", *map(number, tokens))
    if device_bytes:
        table.add_row("share of the device", *(f"{kind.memory.peak / device_bytes:.0%}" for kind in kinds))
    return table


def _add_training(table: Table, kinds: Sequence[RankKind]) -> None:
    if not kinds[0].memory.step.moment:  # rollout.only
        return
    moments = [f"{kind.memory.training / GB:.2f}" for kind in kinds]
    table.add_row("while training", *moments)
    table.add_row("  peak at the", *(kind.memory.step.moment for kind in kinds), end_section=True)


def span(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges, shortened to three.

    >>> span((0, 1, 2, 3)), span((5,)), span((0, 2, 4, 6)), span((0, 1, 4, 5, 8, 9))
    ('0-3', '5', '0, 2, .. 6', '0-1, 4-5, .. 8-9')
    """
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(texts if len(texts) <= 2 else [*texts[:2], f".. {texts[-1]}"])


def json_line(models: Models, memory: Sequence[RankMemory], world_size: int, unchecked: Sequence[str]) -> str:
    """World size, parameters in all, ranks (one entry a rank), max_bytes_per_rank and not_checked, without breaks."""
    ranks: list[dict[str, int]] = [{} for _ in range(world_size)]
    for held in models.holdings:
        of_stage = memory[held.position.pp]
        for rank in held.ranks:
            ranks[rank] = {
                "rank": rank,
                "stage": held.position.pp,
                "parameters": held.parameters,
                "trained": held.trained,
                "training_bytes": of_stage.training,
                "rollout_bytes": of_stage.rollout,
            }
    assert all(ranks), "a rank without a position"
    return json.dumps(
        {
            "world_size": world_size,
            "parameters_total": models.total,
            "trained_total": models.trained,
            "ranks": ranks,
            "max_bytes_per_rank": max(memory[held.position.pp].peak for held in models.holdings),
            "not_checked": list(unchecked),
        }
    )
