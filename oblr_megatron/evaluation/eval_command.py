"""`oblr-megatron eval`: options and entry point."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from oblr_megatron.errors import EXIT_OK

FILE_WIDTH = 120  # table width if the output is not a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face directory")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="LoRA adapter of the model, in PEFT's format")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="SET",
        help="NAME=PATH, a path, a hub set or a convention (docs/data.md); by default the config's evaluate.data",
    )
    parser.add_argument(
        "--k", type=int, metavar="K", help="sampled responses per prompt; by default the config's samples_per_prompt"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file or config.json of a run: template, reward, sampling"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="save all responses and the metrics here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the metrics here")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of config keys")
    parser.set_defaults(function=evaluate_model)


def evaluate_model(options: argparse.Namespace) -> int:
    """Run the evaluation and print its table.

    Raises:
        UserError: a bad config, model, reward, data set or directory, before any engine is started.
        RunError: an engine or the reward failed, or the disk is full.
    """
    from rich.console import Console

    from oblr_megatron.evaluation.session import check, run
    from oblr_megatron.evaluation.setup import split_overrides
    from oblr_megatron.evaluation.summary import table

    options.data, keys = split_overrides(options.data)
    options.overrides = [*options.overrides, *keys]
    shown = table(run(check(options)))
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(shown)
    return EXIT_OK
