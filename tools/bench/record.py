"""Print a benchmark's table and write its JSON file."""

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
    """Print a table with one column per field, and write the file if there is a path.

    Args:
        rows: at least one dataclass instance, all of one class.
        title: the table's title.
        path: see `write_record`.
    """
    table = Table(*asdict(rows[0]), title=title)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in asdict(row).values()))
    Console(width=WIDTH).print(table)
    if path is not None:
        write_record(path, rows)


def write_record(path: Path, rows: Sequence[Any], machine: str | None = None) -> None:
    """Write {"machine":, "date":, "rows": [...]}.

    Args:
        path: the file; its directory is created.
        rows: dataclass instances.
        machine: description; by default processor, cores and torch version.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    record = {
        "machine": machine or f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "date": datetime.now(UTC).date().isoformat(),
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
