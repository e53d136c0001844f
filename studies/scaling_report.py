"""Write the results of `study scaling`: a table (scaling.md) and a chart of predicted over measured (.svg, .png)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oblr_megatron.formatting import number
from studies.plotting import COLOURS, INK, WIDTH, save, styled
from studies.summary import environment
from studies.tables import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from oblr_megatron.extras.planner.calibration import Fitted
    from studies.scaling import Ranking, Row

ROOM = 1.15  # margin factor around the outermost points
HEADER = (
    "case",
    "ranks",
    "measured s",
    "predicted s",
    "ratio",
    "rounds differ by",
    "memory MB",
    "estimated MB",
    "ratio",
)
HEAD = """# Predicted and measured: layouts on this machine's cores

{date}, {machine}. Time of a step: norms, gradient and optimizer. *predicted*: with constants fitted to all other rows.
Memory: peak of live tensors on the fullest rank. Ranks share the cores if there are more ranks than cores.
"""


def write(rows: Sequence[Row], ranking: Ranking, fitted: Fitted, out: Path) -> str:
    """Write the files; returns the tables."""
    text = document(rows, ranking, fitted)
    (out / "scaling.md").write_text(text, encoding="utf-8")
    with styled():
        save(draw(rows), out / "scaling")
    return text


def document(rows: Sequence[Row], ranking: Ranking, fitted: Fitted) -> str:
    """Summary, table and constants as Markdown."""
    where = environment()
    worst = max((row.memory_ratio for row in rows), key=lambda ratio: abs(ratio - 1))
    lines = [
        HEAD.format(date=where["date"], machine=where["machine"]),
        f"Rank correlation {ranking.spearman:.3f} over {ranking.layouts} layouts. Two rounds differ by "
        f"{ranking.noise:.1%} (root mean square). {ranking.pairs} pairs of times differ by more than twice that; "
        f"{ranking.right} of them are predicted in order. {ranking.distinct} layouts differ pairwise by that much.",
        f"Memory: the worst estimate is {worst:.3f} of the measured bytes.",
        "",
        table(HEADER, [_cells(row) for row in sorted(rows, key=lambda row: row.seconds)]),
        "Constants fitted to all rows "
        f"(residual {fitted.rms:.3f}, root mean square of log ratios of single phases): "
        + ", ".join(f"{name} {number(getattr(fitted.constants, name))}" for name in fitted.names)
        + ".",
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    times = [number(row.seconds), number(sum(row.predicted.values())), f"{row.ratio:.2f}", f"{row.noise:.0%}"]
    memory = [f"{row.memory / 1e6:.1f}", f"{row.estimated / 1e6:.1f}", f"{row.memory_ratio:.3f}"]
    return [row.name, str(row.ranks), *times, *memory]


def draw(rows: Sequence[Row]) -> Figure:
    """Draw predicted over measured, time left and memory right, on log axes. Colours are numbers of ranks."""
    import matplotlib.pyplot as plt

    figure, (times, memory) = plt.subplots(1, 2, figsize=(WIDTH, WIDTH / 2.2), layout="constrained")
    for colour, ranks in zip(COLOURS, sorted({row.ranks for row in rows}), strict=False):
        own = [row for row in rows if row.ranks == ranks]
        label = f"{ranks} rank" + ("s" if ranks > 1 else "")
        predicted = [sum(row.predicted.values()) for row in own]
        times.plot([row.seconds for row in own], predicted, "o", color=colour, label=label)
        memory.plot([row.memory / 1e6 for row in own], [row.estimated / 1e6 for row in own], "o", color=colour)
    _compare(
        times, "A step's time", "s", [value for row in rows for value in (row.seconds, sum(row.predicted.values()))]
    )
    _compare(memory, "Memory of the fullest rank", "MB", [b / 1e6 for row in rows for b in (row.memory, row.estimated)])
    times.legend(frameon=False, fontsize=8)
    return figure


def _compare(axes: Axes, title: str, unit: str, values: Sequence[float]) -> None:
    """Set equal log scales (measured on x, predicted on y) and draw the diagonal."""
    low, high = min(values) / ROOM, max(values) * ROOM
    axes.axline((1, 1), slope=1, color=INK, linewidth=0.8, zorder=1)
    axes.set(xscale="log", yscale="log", title=title, xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}")
    ticks = [digit * 10.0**power for power in range(-6, 9) for digit in (1, 2, 5) if low < digit * 10.0**power < high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.set(xlim=(low, high), ylim=(low, high))
