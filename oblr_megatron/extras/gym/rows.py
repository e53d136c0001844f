"""Rows of reasoning-gym's tasks, for the sources "reasoning_gym:NAME".

Each seed selects two ranges of the package's seeds: one for training, one for evaluation and exclusion. Item i of a
task is a function of package seed + i, so that the ranges share no item. Two items may still ask the same question; the
overlap check drops those from the training rows (data/training.py).

This module is also the process that generates the rows. It prints one JSON object a line:

    python -m oblr_megatron.extras.gym.rows REQUEST
    {"name": "gcd", "options": {}, "seed": 0, "size": 2, "where": "", "row_s": 60, "parent": 4711}

    {"question": "Find the ...", "answer": "12", "reasoning_gym": {"name": "gcd", "options": {}, "entry": "{...}"}}

With some options a task has no solution and loops. So the kernel ends the process after `row_s` for one item (SIGALRM).
The kernel also ends the process with its parent.

An item that cannot be generated prints its reason as a JSON string, a mistake in the request {"error": [what, fix]}.

Some tasks draw from the global generators or depend on the order of sets. Here both are the same in every process: the
generators are seeded for each item, and PYTHONHASHSEED is set.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from oblr_megatron.config.data import MOST_ROWS, SourceConfig
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.extras.gym.reward import COLUMN, cause_of, make_task
from oblr_megatron.runtime.processes import die_with

Row = dict[str, Any] | str  # or the reason why it cannot be generated
TRAINING_ROWS, OTHER_ROWS = 5000, 500  # without `size`
ROW_S = 60.0  # most seconds for an item
NO_GOLD = "(no gold answer)"  # some tasks only check an answer
LIMIT = 2**32  # of numpy's seeds
KEPT_ROWS = 10_000  # most rows of a held-out set that are kept: the overlap check and the evaluation read them


def package_seed(source: SourceConfig, *, training: bool) -> int:
    """The package's seed of the first item. Example: seed 0 -> 0 for training, 1,000,000 for evaluation."""
    return (2 * source.seed + (not training)) * MOST_ROWS


def gym_rows(source: SourceConfig, *, training: bool) -> Iterator[Row]:
    """The rows of a source, or the reason why an item cannot be generated.

    A process of its own generates them: with its own order of sets and its own global random generators, the same on
    every rank.

    Raises:
        UserError: see `make_task`; or an item takes longer than ROW_S.
        RunError: the process failed.
    """
    if training or (source.size or OTHER_ROWS) > KEPT_ROWS:
        return _generated(source, training=training)
    return iter(_held_out(source.model_dump_json()))


@lru_cache(maxsize=8)
def _held_out(source: str) -> tuple[Row, ...]:
    return tuple(_generated(SourceConfig.model_validate_json(source), training=False))


def _generated(source: SourceConfig, *, training: bool) -> Iterator[Row]:
    command = [sys.executable, "-m", "oblr_megatron.extras.gym.rows", json.dumps(request_of(source, training=training))]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
        ) as process,
    ):
        assert process.stdout is not None, "it is a pipe"
        try:
            for line in process.stdout:
                row = json.loads(line)
                if isinstance(row, dict) and "error" in row:
                    what, fix = row["error"]
                    raise UserError(what, where=source.path, fix=fix)
                yield row
        except BaseException:  # nobody reads on
            process.kill()
            raise
        if process.wait() == -signal.SIGALRM:
            what = f"the task {source.gym_task!r} needs more than {ROW_S:g} s for an item"
            raise UserError(what, where=source.path, fix="choose other options: with these there may be no solution")
        if process.returncode:
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise RunError(f"the rows of {source.path} could not be generated: {last}")


def request_of(source: SourceConfig, *, training: bool) -> dict[str, Any]:
    """What a process is asked for; see the top of this module."""
    return {
        "name": source.gym_task,
        "options": source.options,
        "seed": package_seed(source, training=training),
        "size": source.size or (TRAINING_ROWS if training else OTHER_ROWS),
        "where": source.path,
        "row_s": ROW_S,
        "parent": os.getpid(),
    }


def rows(request: dict[str, Any]) -> Iterator[Row]:
    """The rows, or the reason why an item cannot be generated.

    Raises:
        UserError: see `make_task`.
    """
    import numpy as np

    name, options, seed = request["name"], request["options"], request["seed"]
    random.seed(seed)
    np.random.seed(seed % LIMIT)
    task = make_task(name, options, seed=seed, size=request["size"], where=request["where"])
    for index in range(request["size"]):
        random.seed(seed + index)
        np.random.seed((seed + index) % LIMIT)
        signal.setitimer(signal.ITIMER_REAL, request["row_s"])
        try:
            entry = plain(task[index])
        except Exception as error:  # noqa: BLE001  a task may fail on an item in any way; the others are kept
            yield f"cannot be generated: {cause_of(error)}"
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # the reader may pause
        gold = entry["answer"] if isinstance(entry["answer"], str) else ""
        item = {"name": name, "options": options, "entry": repr(entry)}
        yield {"question": entry["question"], "answer": gold if gold.strip() else NO_GOLD, COLUMN: item}


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


def main() -> int:
    """Answer the request, the only argument. Whatever the package prints goes to standard error."""
    request = json.loads(sys.argv[1])
    die_with(request["parent"])
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        for row in rows(request):
            output.write(json.dumps(row) + "\n")
    except UserError as error:
        output.write(json.dumps({"error": [error.what, error.fix]}) + "\n")
    output.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
