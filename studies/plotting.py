"""Style of the charts of all studies, and saving them as SVG and PNG at the width of a README."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 9.0  # inches
DPI = 160
INK, GREY, FAINT, PEER = "#1f2328", "#8c959f", "#d0d7de", "#bc4c00"
COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#9a6700")
STYLE: Any = {  # matplotlib settings
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "figure.facecolor": "white",
    "svg.hashsalt": "study",
    "svg.fonttype": "path",
}


@contextmanager
def styled() -> Iterator[None]:
    """Apply the charts' style, as a context manager or decorator. Needs no display."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        mpl.use("Agg")
        yield


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write STEM.svg and STEM.png, and close the figure; returns the paths."""
    import matplotlib.pyplot as plt

    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png")]
    with styled():
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(path, dpi=DPI, metadata=metadata)
    plt.close(figure)
    return paths
