"""One rank of a training run that writes its phase where tools/soak.py reads it; else as `oblr_megatron.train`.

SOAK_PHASE=FILE python tools/soak_rank.py CONFIG.toml [section.key=value ...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from oblr_megatron.observe.console import Display
from oblr_megatron.train import main

FIELD = 64
"""Bytes of the file: "rollout 3" and spaces, the phase and the steps that are done."""
BETWEEN = "-"
"""Stands for the time between two phases."""


def tell_phases(path: Path) -> None:
    """Have every display write the phase that begins, in place, so that a reader never finds half of it."""
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
