"""Figures of a line, written to a file one by one: what was measured survives the process."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Report:
    """Appends figures to a file of JSON lines. A name that comes again replaces the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, name: str, value: float | str) -> None:
        """Write one figure; one that is not finite is written as text, which meets no bound."""
        if not isinstance(value, str):
            value = float(value) if math.isfinite(value) else str(value)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, value]) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read(path: Path) -> dict[str, float | str]:
    """The figures of a file, in their order; a line that a kill cut short is left out."""
    figures: dict[str, float | str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            name, value = json.loads(line)
        except ValueError:
            continue
        figures[name] = value
    return figures
