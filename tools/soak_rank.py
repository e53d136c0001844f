"""Run `oblr_megatron.step_loop` on one rank and write its current phase to a file, which tools/soak.py reads.

SOAK_PHASE=FILE python tools/soak_rank.py CONFIG.toml [section.key=value ...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from oblr_megatron.observe.console import Display
from oblr_megatron.step_loop import main

FIELD = 64
"""Bytes of the file: the phase, the completed steps, padding. Example: "rollout 3" and spaces."""
BETWEEN = "-"
"""Written between two phases."""


def tell_phases(path: Path) -> None:
    """Make every Display write the phase that begins, in one write, so that a reader never sees part of it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    show = Display.phase

    def phase(display: Display, name: str | None) -> None:
        os.pwrite(file, f"{name or BETWEEN} {display.last_step}".ljust(FIELD).encode(), 0)
        show(display, name)

    Display.phase = phase  # type: ignore[assignment]


if __name__ == "__main__":
    if os.environ.get("RANK", "0") == "0":
        tell_phases(Path(os.environ["SOAK_PHASE"]))
    sys.exit(main())
