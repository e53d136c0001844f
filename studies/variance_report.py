"""Write the results of `study variance`: tables per task and skill (variance.md) and a chart (.svg, .png)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oblr_megatron.formatting import MISSING
from studies.plotting import COLOURS, GREY, INK, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from studies.variance import Cell

SHOWN = {  # baselines in the chart, with label and colour; the tables have all baselines
    "rloo": ("rloo", INK),
    "grpo": ("grpo", COLOURS[4]),
    "none": ("no baseline", COLOURS[1]),
    "pooled_mean": ("pooled mean reward", COLOURS[3]),
    "optimal": ("optimal", COLOURS[2]),
    "pooled": ("pooled, norm-weighted", COLOURS[0]),
    "oracle": ("best constant b (bound)", GREY),
}

HEAD = """# Gradient variance at a fixed policy, by baseline

The noise of one prompt's gradient has a part within the prompt, from its responses, and a part between prompts.

- *within*: noise-to-signal ratio relative to rloo's at the same G [95% interval over prompts], of the first part alone.
  For unbiased baselines this is the ratio of traces.
- *equal samples*: both parts together, times G: the noise of a step with a fixed number of samples Q G, relative to
  rloo's at rloo's best G. `oracle`, the best constant b of each prompt, is the limit of what a baseline can reach.
- *align*: cosine of the expected gradient with the unbiased one at the largest G. If it is below 1 by more than noise,
  the baseline or the tempering rotates the gradient.

Pooled baselines take b from the responses to all other prompts. These replace the responses of earlier steps.
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
    rloo, best = {cell.group_size: cell for cell in cells if cell.baseline == "rloo"}, best_of_rloo(cells)
    grouped = [size for size in sizes if size > 1]
    traces = ", ".join(f"{rloo[size].trace:.3g}" for size in grouped)
    lines = [
        f"## {cells[0].task}, {cells[0].skill}\n",
        f"Between prompts: {cells[0].between:.3g}. Within, rloo: {traces} at G = {', '.join(map(str, grouped))}.",
        f"rloo's best G at equal samples: {best.group_size}.\n",
        f"| baseline | {' | '.join([f'within, G = {n}' for n in grouped] + [f'equal samples, G = {n}' for n in sizes])}"
        " | align |",
        "|---|" + "---:|" * (len(grouped) + len(sizes) + 1),
    ]
    for name in dict.fromkeys(cell.baseline for cell in cells):
        own = {cell.group_size: cell for cell in cells if cell.baseline == name}
        within = [f"{c.ratio:.2f} [{c.low:.2f}, {c.high:.2f}]" if (c := own.get(n)) else MISSING for n in grouped]
        equal = [f"{equal_samples(own[n], best):.2f}" if n in own else MISSING for n in sizes]
        lines.append(f"| {name} | {' | '.join(within + equal)} | {own[max(own)].alignment:.2f} |")
    return "\n".join(lines) + "\n"


def best_of_rloo(cells: Sequence[Cell]) -> Cell:
    """rloo's cell with the least noise at equal samples, of one task at one skill."""
    return min((cell for cell in cells if cell.baseline == "rloo"), key=lambda cell: cell.total * cell.group_size)


def equal_samples(cell: Cell, best: Cell) -> float:
    """Noise of a step with a fixed number of samples, relative to another cell's."""
    return cell.total * cell.group_size / (best.total * best.group_size)


def draw(cells: Sequence[Cell]) -> Figure:
    """Draw the noise at equal samples over G, one panel per task (rows) and skill (columns)."""
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
        axis.set_ylabel("noise, rloo = 1")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=-(-len(SHOWN) // 2), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.6 / figure.get_figheight()))
    return figure


def _panel(axis: Axes, cells: Sequence[Cell], title: str) -> None:
    axis.set_title(title)
    axis.axhline(1.0, color=INK, linewidth=0.8)
    best = best_of_rloo(cells)
    for name, (label, colour) in SHOWN.items():
        own = sorted((cell for cell in cells if cell.baseline == name), key=lambda cell: cell.group_size)
        sizes = [cell.group_size for cell in own]
        style = "--" if name == "oracle" else "-"
        noise = [equal_samples(cell, best) for cell in own]
        axis.plot(sizes, noise, style, color=colour, label=label, marker="o", markersize=3)
    axis.set_xscale("log", base=2)
    ticks = sorted({cell.group_size for cell in cells})
    axis.set_xticks(ticks, map(str, ticks))
    axis.set_ylim(0.0, 2.5)
