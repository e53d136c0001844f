"""Read the data sets of a config once, so that the Hugging Face hub's cache holds them for jobs, which are offline.

HF_HOME=$PWD/models/hub python tools/fetch_data.py slurm/configs/qwen3_8b.toml
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from oblr_megatron.config import load_config
from oblr_megatron.data.sources import open_source, sources_of
from oblr_megatron.errors import EXIT_OK
from oblr_megatron.runtime.command_line import Parser, guarded


def fetch(options: argparse.Namespace) -> int:
    """Count the rows of every source.

    Raises:
        UserError: a source cannot be opened or read.
    """
    for source, training in sources_of(load_config(options.config, options.overrides)):
        rows = sum(1 for _ in open_source(source, training=training))
        print(f"{source.path}: {rows:,} rows", flush=True)
    return EXIT_OK


def main() -> int:
    """Parse the arguments and read; returns the exit status."""
    parser = Parser(prog="fetch_data.py", description="read the data sets of a config once")
    parser.add_argument("config", type=Path, help="TOML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of single keys")
    return guarded(lambda: fetch(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
