"""The figures of a benchmark: the table it prints, and the file it writes."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

WIDTH = 120


def publish(rows: Sequence[Any], title: str, path: Path | None) -> None:
    """Print a table with a column for each field, and write the file if there is to be one.

    Args:
        rows: dataclass instances, all of one class; at least one.
        title: of the table.
        path: see `write_record`.
    """
    table = Table(*asdict(rows[0]), title=title)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in asdict(row).values()))
    Console(width=WIDTH).print(table)
    if path is not None:
        write_record(path, rows)


def write_record(path: Path, rows: Sequence[Any], machine: str | None = None, **more: object) -> None:
    """{"machine":, "date":, "rows": [...]}, and what else is given.

    Args:
        path: of the file; its directory is made.
        rows: dataclass instances.
        machine: in words; by default processor, cores and torch.
        more: further entries.

    Raises:
        ValueError: a figure is no number.
    """
    record = {
        "machine": machine or f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "date": datetime.now(UTC).date().isoformat(),
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record | more, indent=2, allow_nan=False) + "\n", encoding="utf-8")
