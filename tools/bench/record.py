"""The file of figures that a benchmark writes."""

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
