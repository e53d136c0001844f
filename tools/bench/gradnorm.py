"""Measure the cost of per-sample gradient norms: steps with norms against a plain RLOO step and Opacus ghost clipping.

    python tools/bench/gradnorm.py --json run/bench/gradnorm.json       up to ten minutes on two cores; `make bench`
    python tools/bench/gradnorm.py --shapes qwen3-0.6b qwen3-8b --tokens 512 2048 8192 --minutes 0      the whole table
    python tools/bench/gradnorm.py --fit --shapes tiny --tokens 256     growth of the cost with G, T and P
    python tools/bench/gradnorm.py --lora 16 --modes inline auto        adapters of rank 16 on all matrices
    python tools/bench/gradnorm.py --profile bookkeep --tokens 2048     time by operator

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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from fits import power_law
from meter import Meter
from operators import WIDTH, measure_rates, operators_of, show_operators
from record import write_record
from rich.console import Console
from rich.table import Table
from rounds import MIN_ROUNDS, Row, measure
from shapes import SHAPES, Cell
from steps import MODES, PLAIN, build_candidates

from oblr_megatron.config import ParallelConfig
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.precision import DTYPES


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the results."""
    options = parse_options(arguments)
    # Opacus hooks the embedding, and its inputs are token ids without a gradient: the warning is expected
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    torch.set_num_threads(options.threads)
    parallel = initialize(ParallelConfig())
    try:
        if options.profile:
            profile_step(grid(options)[0], options.profile, parallel)
            return
        rows = measure_all(options, parallel)
    finally:
        shutdown()
    show("per-sample gradient norms: cost of a step", [asdict(row) for row in rows])
    fits = fit_rows(rows) if options.fit else []
    if fits:
        show("growth: cost ~ samples^a tokens^b parameters^c", fits)
    if options.json:
        write_json(options.json, rows, fits, parallel)


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
    parser.add_argument("--profile", choices=MODES, metavar="MODE", help="profile one step at the first shape")
    parser.add_argument("--fit", action="store_true", help="vary G, T and layers one at a time and fit exponents")
    return parser.parse_args(arguments)


def measure_all(options: argparse.Namespace, parallel: Parallel) -> list[Row]:
    """The rows of all cells."""
    cells = sweep(options) if options.fit else grid(options)
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


def sweep(options: argparse.Namespace) -> list[Cell]:
    """Variations of the first cell: 1/2 and 2 times samples and tokens, 2 and 4 times the layers, other shapes."""
    base = grid(options)[0]
    changes: list[dict[str, Any]] = [
        {},
        {"samples": max(2, base.samples // 2)},
        {"samples": base.samples * 2},
        {"tokens": base.tokens // 2},
        {"tokens": base.tokens * 2},
        {"layers": base.layers * 2},
        {"layers": base.layers * 4},
        *({"shape": shape} for shape in options.shapes[1:]),
    ]
    return [replace(base, **change) for change in changes]


def fit_rows(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Power laws in G, T and P of the plain step's time, each mode's extra time, and each mode's ratio."""
    fits: list[dict[str, object]] = []
    for mode in dict.fromkeys(row.mode for row in rows):
        mine = [row for row in rows if row.mode == mode]
        variables = {name: [getattr(row, name) for row in mine] for name in ("samples", "tokens", "parameters")}
        for cost in ("seconds",) if mode.startswith(PLAIN) else ("norm_seconds", "ratio_to_plain"):
            fit = power_law([getattr(row, cost) for row in mine], variables)
            fits.append({"mode": mode, "cost": cost, **fit.exponents, "r_squared": fit.r_squared, "points": fit.points})
    return fits


def profile_step(cell: Cell, mode: str, parallel: Parallel) -> None:
    """Print the operators of a mode's second step (for Opacus, of each way)."""
    rates = measure_rates(parallel.device)
    for candidate in build_candidates(cell, [mode], parallel):
        if candidate.mode == mode:
            step = candidate.make()
            step()
            operators = operators_of(step, parallel.device)
            show_operators(f"{mode} {candidate.detail}, {cell}", operators, rates)


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


def write_json(path: Path, rows: Sequence[Row], fits: Sequence[dict[str, object]], parallel: Parallel) -> None:
    """Write {"machine":, "date":, "rows": [...]} and, if any, "fits" with null for NaN."""
    chip = torch.cuda.get_device_name() if parallel.device.type == "cuda" else platform.machine()
    more = {"fits": [{name: none_if_nan(value) for name, value in fit.items()} for fit in fits]} if fits else {}
    write_record(path, rows, f"{chip}, {torch.get_num_threads()} threads, torch {torch.__version__}", **more)


def none_if_nan(value: object) -> object:
    """JSON has no NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    main()
