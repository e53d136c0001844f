"""Print the rows of a reasoning-gym task, one JSON object a line. `data/gym.py` runs it in a process of its own.

    python -m oblr_megatron.data.gym_rows REQUEST
    {"name": "gcd", "options": {}, "seed": 0, "size": 2, "where": "", "row_s": 60, "parent": 4711}

    {"question": "Find the ...", "answer": "12", "reasoning_gym": {"name": "gcd", "options": {}, "entry": "{...}"}}

With some options a task has no solution and loops. So the kernel ends the process after `row_s` for one item (SIGALRM).
It also ends it with its parent.

An item that cannot be generated prints its reason as a JSON string, a mistake in the request {"error": [what, fix]}.

Some tasks draw from the global generators or depend on the order of sets. Here both are the same in every process: the
generators are seeded for each item, and the caller sets PYTHONHASHSEED.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any

from oblr_megatron.errors import UserError
from oblr_megatron.rewards.gym import COLUMN, cause_of, make_task
from oblr_megatron.runtime.processes import die_with

NO_GOLD = "(no gold answer)"  # some tasks only check an answer
LIMIT = 2**32  # of numpy's seeds


def rows(request: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
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
    if isinstance(value, (list, tuple, set)):
        kind = next(kind for kind in (list, tuple, set) if isinstance(value, kind))
        return kind(map(plain, value))
    value = value.item() if hasattr(value, "item") else value  # a scalar of numpy
    if value is None or isinstance(value, bool):
        return value
    return next((kind(value) for kind in (int, float, str) if isinstance(value, kind)), str(value))


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
