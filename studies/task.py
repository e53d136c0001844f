"""`oblr-megatron study task NAME --out DIR`: write a task's model, data and config, to train it on the real stack."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import get_args

from oblr_megatron.errors import EXIT_OK
from studies.tasks import TASKS, Skill


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `study task`."""
    parser.add_argument("name", help=f"one of {', '.join(TASKS)}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="write DIR/NAME-SKILL")
    parser.add_argument("--skill", choices=get_args(Skill), default="middle", help="skill of the warm-started model")
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """Write model, data and config.toml, and print the command that trains it.

    Raises:
        UserError: only the toy trainer has the task's rewards.
    """
    from oblr_megatron.config import parse_config
    from oblr_megatron.formatting import flatten
    from studies.start import plain_task, prepare
    from studies.toy_trainer import ToyConfig
    from studies.train_backend import train_table

    plain_task(options.name, "the trainer")
    start = prepare(options.name, options.skill, options.out)
    toy = ToyConfig.model_validate(
        {"task": options.name, "start_dir": start, "run_dir": start, "optimizer": {"lr": 1e-3, "clip_grad": 0.0}}
    )
    table = train_table(toy)
    parse_config(json.loads(json.dumps(table)))
    given = {key: value for key, value in flatten(table).items() if value is not None}
    config = start / "config.toml"
    if not config.exists():  # it may have been edited
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in given.items()]
        config.write_text("".join(lines), encoding="utf-8")
    print(f"oblr-megatron train {config}")
    return EXIT_OK
