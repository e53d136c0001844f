"""What per-sample gradient norms cost: a plain RLOO step against steps with norms, and against Opacus's ghost clipping.

    python tools/bench/gradnorm.py --json run/bench/gradnorm.json       within ten minutes on two cores; `make bench`
    python tools/bench/gradnorm.py --shapes qwen3-0.6b qwen3-8b --tokens 512 2048 8192 --minutes 0      the whole table
    python tools/bench/gradnorm.py --fit --shapes tiny --tokens 256     how the cost grows with G, T and P
    python tools/bench/gradnorm.py --profile bookkeep --tokens 2048     which operators a step's time goes to

All modes of a line take the same samples through the same layers in one process, in turn, forwards in one round and
backwards in the next; `ratio_to_plain` is the median over rounds of a mode's time to the plain step's of that round,
which a slow drift of the machine leaves alone. `extra_bytes` is the growth of the peak of memory over a plain step
(resident memory on a CPU, what the allocator gives out on a GPU), `norm_seconds` that of its time. For Opacus both are
over PyTorch's own plain step, `plain_torch`; of its two ways, all samples in one batch or one by one, the faster is
taken, and named under `detail`.
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked for, print the tables, write the figures."""
    options = parse_options(arguments)
    # what Opacus hooks on the embedding has token ids for input, which is as it should be
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
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[512], help="response tokens T")
    parser.add_argument("--samples", type=int, default=4, help="responses a step, G")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="rounds measured, at most")
    parser.add_argument(
        "--minutes", type=float, default=7, help=f"begin no round later, but the first {MIN_ROUNDS}; 0 for no bound"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES, help="beside plain")
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="cpu: leave out what others take")
    parser.add_argument("--profile", choices=MODES, metavar="MODE", help="operators of one step, of the first shape")
    parser.add_argument("--fit", action="store_true", help="vary G, T and layers one at a time, and fit exponents")
    return parser.parse_args(arguments)


def measure_all(options: argparse.Namespace, parallel: Parallel) -> list[Row]:
    """The rows of every cell asked for."""
    cells = sweep(options) if options.fit else grid(options)
    share = options.minutes * 60 / len(cells) if options.minutes else math.inf
    meter = Meter(parallel.device, options.clock)
    rows: list[Row] = []
    for cell in cells:
        gc.collect()  # the cell before this one: a policy's hooks refer to it
        rows += measure(cell, build_candidates(cell, options.modes, parallel), meter, options.steps, share)
    return rows


def grid(options: argparse.Namespace) -> list[Cell]:
    """Every shape at every length."""
    return [
        Cell(shape, options.layers, tokens, options.samples) for shape in options.shapes for tokens in options.tokens
    ]


def sweep(options: argparse.Namespace) -> list[Cell]:
    """Around the first cell: half and twice the samples and tokens, two and four times the layers, the other shapes."""
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
    """Power laws in G, T and P: of the time of a plain step, of what each mode adds, and of its ratio."""
    fits: list[dict[str, object]] = []
    for mode in dict.fromkeys(row.mode for row in rows):
        mine = [row for row in rows if row.mode == mode]
        variables = {name: [getattr(row, name) for row in mine] for name in ("samples", "tokens", "parameters")}
        for cost in ("seconds",) if mode.startswith(PLAIN) else ("norm_seconds", "ratio_to_plain"):
            fit = power_law([getattr(row, cost) for row in mine], variables)
            fits.append({"mode": mode, "cost": cost, **fit.exponents, "r_squared": fit.r_squared, "points": fit.points})
    return fits


def profile_step(cell: Cell, mode: str, parallel: Parallel) -> None:
    """The operators of the second step of a mode (for Opacus, of each of its ways)."""
    rates = measure_rates(parallel.device)
    for candidate in build_candidates(cell, [mode], parallel):
        if candidate.mode == mode:
            step = candidate.make()
            step()
            operators = operators_of(step, parallel.device)
            show_operators(f"{mode} {candidate.detail}, {cell}", operators, rates)


def show(title: str, rows: Sequence[dict[str, object]]) -> None:
    """A table, on the terminal."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(text(value) for value in row.values()))
    Console(width=WIDTH).print(table)


def text(value: object) -> str:
    """Three digits of a measured figure, thousands of a count."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write_json(path: Path, rows: Sequence[Row], fits: Sequence[dict[str, object]], parallel: Parallel) -> None:
    """{"machine":, "date":, "rows": [...]}, and "fits" where there are any; what is no number becomes null."""
    chip = torch.cuda.get_device_name() if parallel.device.type == "cuda" else platform.machine()
    more = {"fits": [{name: none_if_nan(value) for name, value in fit.items()} for fit in fits]} if fits else {}
    write_record(path, rows, f"{chip}, {torch.get_num_threads()} threads, torch {torch.__version__}", **more)


def none_if_nan(value: object) -> object:
    """JSON has no NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    main()
