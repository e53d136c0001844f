"""Measure the cost of per-sample gradient norms: steps with norms against a plain RLOO step and Opacus ghost clipping.

    python tools/bench/gradnorm.py --json run/bench/gradnorm.json       up to ten minutes on two cores; `make bench`
    python tools/bench/gradnorm.py --shapes qwen3-0.6b qwen3-8b --tokens 512 2048 8192 --minutes 0      the whole table
    python tools/bench/gradnorm.py --lora 16 --modes inline auto        adapters of rank 16 on all matrices

All modes run the same samples through the same layers in one process, in an order that alternates between rounds.

- ratio_to_plain: median over rounds of (mode's time / plain step's time) in one round, so that slow drift cancels
- norm_seconds: time over a plain step
- extra_bytes: peak memory over a plain step (resident memory on a CPU, allocated memory on a GPU)

For Opacus, the last two are over `plain_torch`, PyTorch's own plain step. Opacus can run all samples in one batch or
one by one; the row reports the faster way and names it under `detail`.
"""

from __future__ import annotations

import argparse
import gc
import math
import platform
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from meter import Meter
from record import write_record
from rich.console import Console
from rich.table import Table
from rounds import MIN_ROUNDS, Row, measure
from shapes import SHAPES, Cell
from steps import MODES, build_candidates

from oblr_megatron.config import ParallelConfig
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.precision import DTYPES

WIDTH = 140  # columns of the table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    options = parse_options(arguments)
    # Opacus hooks the embedding, and its inputs are token ids without a gradient: the warning is expected
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    torch.set_num_threads(options.threads)
    parallel = initialize(ParallelConfig())
    try:
        rows = measure_all(options, parallel)
    finally:
        shutdown()
    show("per-sample gradient norms: cost of a step", [asdict(row) for row in rows])
    if options.json:
        chip = torch.cuda.get_device_name() if parallel.device.type == "cuda" else platform.machine()
        write_record(options.json, rows, f"{chip}, {torch.get_num_threads()} threads, torch {torch.__version__}")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[512], help="response tokens T")
    parser.add_argument("--samples", type=int, default=4, help="G, responses per step")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="largest number of rounds")
    parser.add_argument(
        "--minutes", type=float, default=7, help=f"start no round later, except the first {MIN_ROUNDS}; 0: no limit"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the weights; not of PyTorch's own steps")
    parser.add_argument("--layers-of", default="auto", choices=("auto", "local", "transformer_engine"))
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train adapters, except in PyTorch's own steps"
    )
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES, help="besides plain")
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="cpu: ignore other processes' load")
    return parser.parse_args(arguments)


def measure_all(options: argparse.Namespace, parallel: Parallel) -> list[Row]:
    """The rows of all cells."""
    cells = grid(options)
    share = options.minutes * 60 / len(cells) if options.minutes else math.inf
    meter = Meter(parallel.device, options.clock)
    rows: list[Row] = []
    for cell in cells:
        gc.collect()  # frees the previous cell: hooks and policy refer to each other
        rows += measure(cell, build_candidates(cell, options.modes, parallel), meter, options.steps, share)
    return rows


def grid(options: argparse.Namespace) -> list[Cell]:
    """Every shape at every length."""
    return [
        Cell(shape, options.layers, tokens, options.samples, options.dtype, options.layers_of, options.lora)
        for shape in options.shapes
        for tokens in options.tokens
    ]


def show(title: str, rows: Sequence[dict[str, object]]) -> None:
    """Print a table."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(text(value) for value in row.values()))
    Console(width=WIDTH).print(table)


def text(value: object) -> str:
    """A measured value with three digits; a count with thousands separators."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
