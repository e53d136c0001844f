"""Write the results of `study variance`: tables per task and skill (variance.md) and a chart (.svg, .png)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from studies.plotting import COLOURS, GREY, INK, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from studies.variance import Cell

SHOWN = {  # baselines in the chart, with label and colour; the tables have all baselines
    "rloo_prior": ("rloo + prior", COLOURS[3]),
    "opo": ("opo", COLOURS[4]),
    "length_loo": ("length, leave-one-out", COLOURS[1]),
    "optimal": ("optimal", COLOURS[2]),
    "optimal_prior": ("optimal + prior (default)", COLOURS[0]),
    "oracle": ("best constant b (bound)", GREY),
}

HEAD = """# Gradient variance at a fixed policy, by baseline

Noise-to-signal ratio of one prompt's gradient relative to rloo's [95% interval over prompts]. For unbiased baselines
this is the ratio of traces. *align*: cosine of the expected gradient with the unbiased one at the largest G. If it is
below 1 by more than noise, the baseline rotates the gradient.
"""


def write(cells: Sequence[Cell], out: Path) -> str:
    """Write the files; returns the table."""
    text = document(cells)
    (out / "variance.md").write_text(text, encoding="utf-8")
    with styled():
        save(draw(cells), out / "variance")
    return text


def document(cells: Sequence[Cell]) -> str:
    """All tables as Markdown."""
    parts = [HEAD]
    for task in dict.fromkeys(cell.task for cell in cells):
        for skill in dict.fromkeys(cell.skill for cell in cells if cell.task == task):
            parts.append(_table([cell for cell in cells if (cell.task, cell.skill) == (task, skill)]))
    return "\n".join(parts)


def _table(cells: Sequence[Cell]) -> str:
    """The table of one task at one skill: one line per baseline, one column per group size."""
    sizes = sorted({cell.group_size for cell in cells})
    traces = ", ".join(f"{c.trace:.3g}" for c in cells if c.baseline == "rloo")
    lines = [
        f"## {cells[0].task}, {cells[0].skill}\n",
        f"rloo's tr(H): {traces} at G = {', '.join(map(str, sizes))}\n",
        f"| baseline | {' | '.join(f'G = {size}' for size in sizes)} | align |",
        "|---|" + "---:|" * (len(sizes) + 1),
    ]
    for name in dict.fromkeys(cell.baseline for cell in cells):
        own = sorted((cell for cell in cells if cell.baseline == name), key=lambda cell: cell.group_size)
        values = " | ".join(f"{cell.ratio:.2f} [{cell.low:.2f}, {cell.high:.2f}]" for cell in own)
        lines.append(f"| {name} | {values} | {own[-1].alignment:.2f} |")
    return "\n".join(lines) + "\n"


def draw(cells: Sequence[Cell]) -> Figure:
    """Draw the ratio over G, one panel per task (rows) and skill (columns)."""
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(cell.task for cell in cells))
    skills = list(dict.fromkeys(cell.skill for cell in cells))
    figure, axes = plt.subplots(
        len(tasks), len(skills), figsize=(9.0, 2.1 * len(tasks) + 0.7), sharex=True, sharey=True, squeeze=False
    )
    for row, task in enumerate(tasks):
        for column, skill in enumerate(skills):
            own = [cell for cell in cells if (cell.task, cell.skill) == (task, skill)]
            _panel(axes[row, column], own, f"{task}, {skill} skill")
    for axis in axes[-1]:
        axis.set_xlabel("G, responses per prompt")
    for axis in axes[:, 0]:
        axis.set_ylabel("variance, rloo = 1")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(SHOWN) // 2, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.6 / figure.get_figheight()))
    return figure


def _panel(axis: Axes, cells: Sequence[Cell], title: str) -> None:
    axis.set_title(title)
    axis.axhline(1.0, color=INK, linewidth=0.8)
    for name, (label, colour) in SHOWN.items():
        own = sorted((cell for cell in cells if cell.baseline == name), key=lambda cell: cell.group_size)
        sizes = [cell.group_size for cell in own]
        style = "--" if name == "oracle" else "-"
        axis.plot(sizes, [cell.ratio for cell in own], style, color=colour, label=label, marker="o", markersize=3)
        if name == "optimal_prior":
            axis.fill_between(sizes, [c.low for c in own], [c.high for c in own], color=colour, alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    ticks = sorted({cell.group_size for cell in cells})
    axis.set_xticks(ticks, map(str, ticks))
    axis.set_ylim(0.0, 1.35)
