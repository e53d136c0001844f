"""Formats numbers for people, and flattens nested settings to dotted names."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MISSING = "–"  # noqa: RUF001 (an en dash is the typographic sign for "no value")
TAIL_BYTES = 2**16  # a log may have gigabytes


def number(value: float | None, digits: int = 3) -> str:
    """A value with `digits` significant digits, short enough for a table cell.

    >>> number(0.53124), number(8.1e-4), number(12345.6), number(312.4, 2), number(None), number(float("nan"))
    ('0.531', '8.1e-4', '12,346', '312', '–', 'nan')
    """
    if value is None:
        return MISSING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    if not 1e-3 <= abs(value) < 1e7:
        return scientific(value, digits)
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if abs(value) >= 1000 or "e" in text else text


def scientific(value: float | None, digits: int = 2) -> str:
    """Mantissa and exponent without padding.

    >>> scientific(8.13e-4), scientific(2e-6, 1), scientific(1e-3)
    ('8.1e-4', '2e-6', '1e-3')
    """
    if value is None:
        return MISSING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"


def fixed(value: float | None, decimals: int) -> str:
    """A value with a fixed number of decimals."""
    return MISSING if value is None else f"{value:.{decimals}f}"


def duration(seconds: float | None) -> str:
    """A time span in its two largest units.

    >>> duration(0.063), duration(2.13), duration(312), duration(7500), duration(200000)
    ('63 ms', '2.1 s', '5 min 12 s', '2 h 05 min', '2 d 7 h')
    """
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds else "0 s"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def size(num_bytes: float | None) -> str:
    """Bytes in binary units.

    >>> size(512), size(3 * 2**20), size(1010 * 2**20)
    ('512 B', '3 MiB', '1,010 MiB')
    """
    if num_bytes is None or not math.isfinite(num_bytes):
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{number(num_bytes)} {unit}"
        num_bytes /= 1024
    return f"{number(num_bytes)} TiB"


def quantity(value: float | None, unit: str) -> str:
    """A value with the prefix of its unit, for bytes and seconds; other units are not part of the text."""
    if unit == "bytes":
        return size(value)
    if unit == "s":
        return duration(value)
    return number(value)


def searched_from(path: str | Path) -> str:
    """The end of a fix for a path that is not there: the directory where a relative path starts.

    >>> searched_from("/models/q")
    ''
    """
    return "" if os.path.isabs(path) else f"; relative paths start at {os.getcwd()}"


def log_tail(path: Path) -> str:
    """The last 15 lines of a process's log, or what `TAIL_BYTES` hold of them, indented, for an error message."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = log.read(TAIL_BYTES).decode(errors="replace").splitlines()[-15:]
    except OSError as error:  # it must not hide what the message is about
        return f"its log {path} cannot be read: {error}"
    return f"the end of {path}:\n" + "\n".join(f"    {line}" for line in lines)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted names, in order.

    >>> flatten({"seed": 0, "snr": {"floor": 0.1}})
    {'seed': 0, 'snr.floor': 0.1}
    """
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
