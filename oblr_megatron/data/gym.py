"""Rows of reasoning-gym's tasks, for the sources "reasoning_gym:NAME".

Each seed selects two ranges of the package's seeds: one for training, one for evaluation and exclusion. Item i of a
task is a function of package seed + i, so that the ranges share no item. Two items may still ask the same question; the
overlap check drops those from the training rows (training.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from oblr_megatron.config.data import MOST_ROWS, SourceConfig
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.rewards.gym import make_task

TRAINING_ROWS, OTHER_ROWS = 5000, 500  # without `size`
ROW_S = 60.0  # most seconds for an item
MODULE = "oblr_megatron.data.gym_rows"


def package_seed(source: SourceConfig, *, training: bool) -> int:
    """The package's seed of the first item. Example: seed 0 -> 0 for training, 1,000,000 for evaluation."""
    return (2 * source.seed + (not training)) * MOST_ROWS


def check_gym(source: SourceConfig) -> None:
    """Check that the rows can be generated; generates none.

    Raises:
        UserError: see `make_task`.
    """
    make_task(source.gym_task, source.options, where=source.path)


def gym_rows(source: SourceConfig, *, training: bool) -> Iterator[dict[str, Any] | str]:
    """The rows of a source, or the reason why an item cannot be generated. See gym_rows.py for their columns.

    A process of its own generates them: with its own order of sets and its own global random generators, the same on
    every rank.

    Raises:
        UserError: see `make_task`; or an item takes longer than ROW_S.
        RunError: the process failed.
    """
    request = {
        "name": source.gym_task,
        "options": source.options,
        "seed": package_seed(source, training=training),
        "size": source.size or (TRAINING_ROWS if training else OTHER_ROWS),
        "where": source.path,
        "row_s": ROW_S,
        "parent": os.getpid(),
    }
    command = [sys.executable, "-m", MODULE, json.dumps(request)]
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
