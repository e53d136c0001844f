"""Do one run of a study in this process: `python -m studies.worker RUN_DIR/asked.json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oblr_megatron.errors import EXIT_OK, UserError
from oblr_megatron.runtime.processes import die_with

if TYPE_CHECKING:
    from studies.toy_trainer import ToyConfig


def run(backend: str, config: ToyConfig) -> int:
    """Run the config on a backend; returns the exit status.

    Raises:
        UserError: the backend is unknown, or only the toy trainer has the task's rewards.
    """
    from studies.start import plain_task

    if backend != "toy" and config.recipe is None:
        plain_task(config.task, f"the backend {backend}")
    match backend:
        case "toy":
            from studies.toy_trainer import run_toy

            run_toy(config)
        case "trl_grpo" | "trl_rloo":
            from studies.trl_backend import run_trl

            run_trl(config, "grpo" if backend == "trl_grpo" else "rloo")
        case "train":
            from studies.train_backend import run_train

            return run_train(config)
        case _:
            raise UserError(f"unknown backend {backend!r}", where="backend", fix="use toy, train, trl_grpo or trl_rloo")
    return EXIT_OK


def main(arguments: list[str]) -> int:
    """Read asked.json and run it."""
    from oblr_megatron.config import validated
    from oblr_megatron.runtime.command_line import guarded
    from studies.toy_trainer import ToyConfig

    (path,) = arguments
    asked = json.loads(Path(path).read_text(encoding="utf-8"))
    return guarded(lambda: run(asked["backend"], validated(ToyConfig, asked["config"], path)))


if __name__ == "__main__":
    die_with(os.getppid())  # the study: otherwise a leftover run and its restart could write the same files
    sys.exit(main(sys.argv[1:]))
