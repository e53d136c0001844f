"""`oblr-megatron eval`: the command's options."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from oblr_megatron.errors import EXIT_OK

FILE_WIDTH = 120  # of the table where no terminal has one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face directory")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="SET",
        help="NAME=PATH, a path, a hub set or a convention (docs/data.md); by default the config's evaluate.data",
    )
    parser.add_argument(
        "--k", type=int, metavar="K", help="sampled responses a prompt beside the greedy one, 0 for none; by default 1"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file of a run, for its template, reward and sampling settings"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write every response here; the same command again goes on"
    )
    parser.add_argument("--overwrite", action="store_true", help="begin anew where --out holds another evaluation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of single keys")
    parser.set_defaults(function=evaluate_model)


def evaluate_model(options: argparse.Namespace) -> int:
    """Answer, judge, write, print.

    Raises:
        UserError: a bad config, model, reward, data set or directory, before any engine is started.
        RunError: an engine failed, or the disk is full; with --out the same command goes on.
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
