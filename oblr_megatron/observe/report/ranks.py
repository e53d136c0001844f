"""Memory of every rank, from RUN_DIR/logs/ranks.jsonl."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oblr_megatron.metrics import RANKS_FILE, intact_lines
from oblr_megatron.observe.report.chart import Curve, Panel

MOST_RANKS = 8  # drawn: the ranks that held most in the last step


def memory_of_ranks(run_dir: Path) -> Panel:
    """A strip with one line per rank; it has no curve if ranks.jsonl is missing or names a single rank."""
    table = [(line["step"], line["memory_bytes"]["allocated"]) for _, line in intact_lines(run_dir / RANKS_FILE)]
    ranks = len(table[-1][1]) if table else 0
    table = [(step, values) for step, values in table if len(values) == ranks]  # a resumed run may have another count
    curves = []
    if ranks > 1:
        steps = np.array([step for step, _ in table], dtype=np.float64)
        values = np.array([values for _, values in table], dtype=np.float64) / 2**30  # [steps, ranks]
        fullest = sorted(np.argsort(-values[-1], kind="stable")[:MOST_RANKS].tolist())
        curves = [
            Curve(f"rank {rank}", steps, values[:, rank], "average", colour)
            for colour, rank in enumerate(fullest, start=1)
        ]
    return Panel("GiB held after the step", curves, include=(0.0,), short=True)
