"""Rows of reasoning-gym's tasks, for the sources "reasoning_gym:NAME".

Each seed selects two ranges of the package's seeds: one for training, one for evaluation and exclusion. Item i of a
task is a function of package seed + i, so that the ranges share no item. Two items may still ask the same question; the
overlap check drops those from the training rows (data/training.py).

A worker process generates the rows. Some tasks draw from the global generators or depend on the order of sets. There
both are the same on every rank: the generators are seeded for each item, and PYTHONHASHSEED is set. With some options a
task has no solution and loops; its worker is killed after ROW_S for one item.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from typing import Any

from oblr_megatron.config.data import MOST_ROWS, SourceConfig
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.extras.gym.reward import COLUMN, cause_of, make_task
from oblr_megatron.processes.pool import Pool

Row = dict[str, Any] | str  # or the reason why it cannot be generated
TRAINING_ROWS, OTHER_ROWS = 5000, 500  # without `size`
ROW_S = 60.0  # most seconds for an item
NO_GOLD = "(no gold answer)"  # some tasks only check an answer
LIMIT = 2**32  # numpy's seeds are below
KEPT_ROWS = 10_000  # most rows of a held-out set that are kept: the overlap check and the evaluation read them


def package_seed(source: SourceConfig, *, training: bool) -> int:
    """The package's seed of the first item. Example: seed 0 -> 0 for training, 1,000,000 for evaluation."""
    return (2 * source.seed + (not training)) * MOST_ROWS


def gym_rows(source: SourceConfig, *, training: bool) -> Iterator[Row]:
    """The rows of a source, the same on every rank; or the reason why an item cannot be generated.

    Raises:
        UserError: an item takes longer than ROW_S.
        RunError: the rows cannot be generated.
    """
    if training or (source.size or OTHER_ROWS) > KEPT_ROWS:
        return _generated(source, training=training)
    return iter(_held_out(source.model_dump_json()))


@lru_cache(maxsize=8)
def _held_out(source: str) -> tuple[Row, ...]:
    return tuple(_generated(SourceConfig.model_validate_json(source), training=False))


def _generated(source: SourceConfig, *, training: bool) -> Iterator[Row]:
    request = request_of(source, training=training)
    size: int = request["size"]
    imports = ("numpy:random", "reasoning_gym:create_dataset")
    pool = Pool(
        f"{__name__}:row", num_workers=1, deadline_s=ROW_S, imports=imports, returns_text=True, tasks_per_worker=size
    )
    with closing(pool):
        for index in range(size):
            score = pool.ask(json.dumps(request), str(index))
            if score.timed_out:
                what = f"the task {source.gym_task!r} needs more than {ROW_S:g} s for an item"
                fix = "choose other options: with these there may be no solution"
                raise UserError(what, where=source.path, fix=fix)
            if score.text is None:
                last = score.error.strip().rpartition("\n")[2]
                raise RunError(f"the rows of {source.path} could not be generated: {last}")
            yield json.loads(score.text)


def request_of(source: SourceConfig, *, training: bool) -> dict[str, Any]:
    """The request for the rows; see `row`."""
    return {
        "name": source.gym_task,
        "options": source.options,
        "seed": package_seed(source, training=training),
        "size": source.size or (TRAINING_ROWS if training else OTHER_ROWS),
        "where": source.path,
    }


def row(request: str, index: str) -> str:
    """In the worker: a `Row` as JSON.

    Args:
        request: JSON, e.g. {"name": "gcd", "options": {}, "seed": 0, "size": 2, "where": "reasoning_gym:gcd"}.
        index: of the item.

    Raises:
        UserError: see `make_task`.
    """
    asked, task = json.loads(request), _task(request)
    _seed(asked["seed"] + int(index))
    try:
        entry = plain(task[int(index)])
    except Exception as error:  # noqa: BLE001  a task may fail on an item in any way; the others are kept
        return json.dumps(f"cannot be generated: {cause_of(error)}")
    gold = entry["answer"] if isinstance(entry["answer"], str) else ""
    item = {"name": asked["name"], "options": asked["options"], "entry": repr(entry)}
    return json.dumps({"question": entry["question"], "answer": gold if gold.strip() else NO_GOLD, COLUMN: item})


@lru_cache(maxsize=1)
def _task(request: str) -> Any:
    asked = json.loads(request)
    _seed(asked["seed"])
    return make_task(asked["name"], asked["options"], seed=asked["seed"], size=asked["size"], where=asked["where"])


def _seed(seed: int) -> None:
    """Seed the global generators."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % LIMIT)


def plain(value: Any) -> Any:
    """The value in Python's own types, so that `ast.literal_eval(repr(...))` gives it back; others become text.

    JSON would turn the tuples and numbered keys into lists and texts that some tasks score differently.
    """
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(plain, value))
    value = value.item() if hasattr(value, "item") else value  # a scalar of numpy
    if value is None or isinstance(value, bool):
        return value
    return next((scalar(value) for scalar in (int, float, str) if isinstance(value, scalar)), str(value))
