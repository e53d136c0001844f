"""Draw the charts of a study of curves, as SVG and PNG, at the width of a README.

Up to TOGETHER arms share one panel, with names at the ends of the curves. More arms get a panel each: the arm in
colour, all others in grey, the reference in black.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from oblr_megatron.formatting import scientific
from studies.plotting import COLOURS, FAINT, GREY, INK, PEER, WIDTH, save, styled
from studies.statistics import Array, t_interval
from studies.summary import ArmSummary, TaskSummary, area
from studies.sweep import Cell
from studies.tables import compared

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOGETHER = 5  # largest number of arms in one panel
COLUMNS = 4
RATE_LABELS = 4
RATIO_TICKS = (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 10)
BOUND_MARKERS = {"": "o", ">": ">", "<": "<", "~": "x"}


def write_charts(tasks: Sequence[TaskSummary], out: Path) -> list[Path]:
    """Write `savings`, and curves_, auc_ and sweep_ of every task that has data for them; returns their paths."""
    paths = save(draw_savings(tasks), out / "savings") if compared(tasks) else []
    for task in tasks:
        for name, draw, ready in (
            ("curves", draw_curves, bool(task.seen)),
            ("auc", draw_differences, _comparable(task)),
            ("sweep", draw_sweeps, any(any(arm.sweep.values()) for arm in task.arms)),
        ):
            paths += save(draw(task), out / f"{name}_{task.task}") if ready else []
    return paths


@styled()
def draw_curves(task: TaskSummary) -> Figure:
    """Accuracy by training samples: mean over seeds with its 95% interval."""
    title = f"{task.task}: held-out accuracy, mean over seeds and its 95% interval"
    if len(task.seen) <= TOGETHER:
        figure, axes = _single(title, height=4.2)
        ends = []
        for arm, colour in zip(task.seen, COLOURS, strict=False):
            mean = _curve(axes, arm, colour, band=True)
            ends.append((f"{arm.arm}  {mean[-1]:.3f}", float(mean[-1]), colour))
        axes.set_xlim(0, max(arm.runs[0].budget for arm in task.seen))
        _label_ends(axes, ends)
        axes.set_xlabel("training samples")
        return figure
    figure, panels = _panels(f"{title}; right: area under the mean", len(task.seen))
    for axes, arm in zip(panels, task.seen, strict=True):
        for other in task.seen:
            if other is not arm:
                _curve(axes, other, INK if other is task.reference else FAINT, band=False)
        _curve(axes, arm, _role(task, arm), band=True)
        _title(axes, arm, _role(task, arm), f"{arm.of(area).mean():.3f}")
    _key(figure, task)
    return figure


def _curve(axes: Axes, arm: ArmSummary, colour: str, *, band: bool) -> Array:
    """Draw the mean curve and, with `band`, its interval; returns the mean [n]."""
    values = np.array([run.accuracy for run in arm.runs])  # [seeds, n]
    run, mean = arm.runs[0], values.mean(axis=0)
    steps = run.steps * (run.budget / run.num_steps)  # in samples
    axes.plot(steps, mean, color=colour, linewidth=1.8 if band else 1.0, zorder=3 if band else _depth(colour))
    if band and len(arm.runs) > 1:
        intervals = [t_interval(column) for column in values.T]
        low, high = ([getattr(interval, end) for interval in intervals] for end in ("low", "high"))
        axes.fill_between(steps, low, high, color=colour, alpha=0.16, linewidth=0, zorder=2.5)
    return np.asarray(mean)


def _depth(colour: str) -> float:
    """Drawing order: the reference lies above the grey curves."""
    return 2.4 if colour == INK else 2.0


def _label_ends(axes: Axes, ends: Sequence[tuple[str, float, str]]) -> None:
    """Write names at the curves' right ends, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    gap = 0.055 * (high - low)
    for (text, value, colour), place in zip(ends, apart([value for _, value, _ in ends], gap), strict=True):
        axes.annotate(
            text,
            (1, value),
            (1.02, place),
            xycoords=axes.get_yaxis_transform(),
            textcoords=axes.get_yaxis_transform(),
            color=colour,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0},
        )


def apart(values: Sequence[float], gap: float) -> list[float]:
    """Move the values as little as possible so that no two are closer than the gap. Keeps their order.

    >>> apart([1.0, 1.0, 5.0], 1.0)
    [0.5, 1.5, 5.0]
    """
    clusters: list[list[int]] = []  # indices; each cluster is centred on the mean of its values

    def places(cluster: list[int]) -> list[float]:
        centre = sum(values[i] for i in cluster) / len(cluster)
        return [centre + gap * (place - (len(cluster) - 1) / 2) for place in range(len(cluster))]

    for index in sorted(range(len(values)), key=lambda i: values[i]):
        clusters.append([index])
        while len(clusters) > 1 and places(clusters[-1])[0] - places(clusters[-2])[-1] < gap:
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    found = {i: place for cluster in clusters for i, place in zip(cluster, places(cluster), strict=True)}
    return [found[i] for i in range(len(values))]


@styled()
def draw_savings(tasks: Sequence[TaskSummary]) -> Figure:
    """The best peer's samples to the target divided by the reference's, for each task.

    A bound (`TaskSummary.bound`) has an arrow for its mean, and no interval on its open side.
    """
    pairs = list(reversed(compared(tasks)))
    name = pairs[0][1].arm
    title = f"Samples to the target: the best peer's, divided by {name}'s (mean over seeds and its 95% interval)"
    figure, axes = _single(title, height=1.3 + 0.34 * len(pairs))
    axes.axvline(1, color=INK, linewidth=1)
    for row, (task, ours, peer) in enumerate(pairs):
        interval, bound = task.saving(ours, peer).interval, task.bound(ours, peer)
        low = interval.mean if bound in ("<", "~") else interval.low
        high = interval.mean if bound in (">", "~") else interval.high
        colour = COLOURS[0] if low > 1 and bound in ("", ">") else PEER if high < 1 and bound in ("", "<") else GREY
        axes.plot([low, high], [row, row], color=colour, linewidth=2)
        axes.plot([interval.mean], [row], BOUND_MARKERS[bound], color=colour, markersize=6)
        text = f"{bound}{interval.mean:.2f}x   {peer.arm} {peer.cell.shape if peer.cell else ''}"
        axes.text(1.02, row, text, transform=axes.get_yaxis_transform(), va="center", color=colour)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [tick for tick in RATIO_TICKS if low <= tick <= high]
    axes.minorticks_off()
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_yticks(range(len(pairs)), [task.task for task, *_ in pairs])
    axes.set_ylim(-0.7, len(pairs) - 0.3)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(
        f"right of 1: {name} needs fewer samples (blue); left: more (orange). Arrow right: at least; left: at most"
    )
    return figure


@styled()
def draw_differences(task: TaskSummary) -> Figure:
    """Each arm's area under the curve minus the reference's: mean, interval and seeds. The best arm is on top."""
    others = [arm for arm in task.seen if arm is not task.reference]
    pairs = [(arm, arm.against(task.reference, area)) for arm in others]
    pairs = sorted((pair for pair in pairs if pair[1].pairs), key=lambda pair: pair[1].interval.mean)
    title = f"{task.task}: area under the curve minus {task.reference.arm}'s, paired by seed"
    figure, axes = _single(title, height=1.3 + 0.32 * len(pairs))
    axes.axvline(0, color=INK, linewidth=1)
    for row, (arm, difference) in enumerate(pairs):
        colour, interval = _role(task, arm), difference.interval
        axes.plot(_paired(arm, task.reference), [row] * difference.pairs, ".", color=colour, alpha=0.35, markersize=5)
        axes.plot([interval.low, interval.high], [row, row], color=colour, linewidth=2)
        axes.plot([interval.mean], [row], "o", color=colour, markersize=6)
        text = f"{interval.mean:+.3f}   p {difference.p:.3g}"
        axes.text(1.02, row, text, transform=axes.get_yaxis_transform(), va="center", color=colour)
    axes.set_yticks(range(len(pairs)), [arm.arm for arm, _ in pairs])
    axes.set_ylim(-0.7, len(pairs) - 0.3)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"left of 0: worse than {task.reference.arm}; right: better")
    _key(figure, task, reference=False)
    return figure


def _comparable(task: TaskSummary) -> bool:
    """Whether some arm has a pair with the reference."""
    return any(len(_paired(arm, task.reference)) for arm in task.seen if arm is not task.reference)


def _paired(arm: ArmSummary, other: ArmSummary) -> list[float]:
    """Differences of area by seed."""
    others = {run.key.seed: run.auc for run in other.runs}
    return [run.auc - others[run.key.seed] for run in arm.runs if run.key.seed in others]


@styled()
def draw_sweeps(task: TaskSummary) -> Figure:
    """Area under the curve by learning rate: mean and single runs of the sweep. A ring marks the chosen rate."""
    arms = [arm for arm in task.arms if any(arm.sweep.values())]
    figure, panels = _panels(f"{task.task}: sweep, area under the curve by learning rate (chosen: ringed)", len(arms))
    means = {
        arm.arm: {cell: float(np.mean([run.auc for run in runs])) for cell, runs in arm.sweep.items() if runs}
        for arm in arms
    }
    for axes, arm in zip(panels, arms, strict=True):
        for other in arms:
            for line in _lines(means[other.arm]) if other is not arm else ():
                axes.plot(*line, color=FAINT, linewidth=1, zorder=2)
        colour, found = _role(task, arm), means[arm.arm]
        for line in _lines(found):
            axes.plot(*line, color=colour, linewidth=1.8, zorder=3)
        dots = [(cell.lr, run.auc) for cell, runs in arm.sweep.items() for run in runs]
        axes.plot(*zip(*dots, strict=True), ".", color=colour, alpha=0.5, markersize=5, zorder=3)
        if arm.cell in found:
            axes.plot([arm.cell.lr], [found[arm.cell]], "o", markersize=9, fillstyle="none", color=colour, zorder=4)
        _rate_axis(axes, sorted({cell.lr for each in arms for cell in each.sweep}))
        shape = arm.cell.shape if arm.cell else ""
        _title(axes, arm, colour, f"{shape}, edge of the grid" if arm.on_edge else shape)
    return figure


def _rate_axis(axes: Axes, rates: list[float]) -> None:
    """Put at most RATE_LABELS ticks at the rates."""
    axes.set_xscale("log")
    axes.minorticks_off()
    shown = rates[:: -(-len(rates) // RATE_LABELS)]
    axes.set_xticks(shown, [scientific(rate) for rate in shown])


def _lines(means: dict[Cell, float]) -> list[tuple[list[float], list[float]]]:
    """(rates, means) of each shape."""
    shapes = dict.fromkeys(cell.shape for cell in means)
    return [
        ([cell.lr for cell in means if cell.shape == shape], [means[cell] for cell in means if cell.shape == shape])
        for shape in shapes
    ]


def _role(task: TaskSummary, arm: ArmSummary) -> str:
    """Colour of an arm: black for the reference, orange for peers, blue for all others."""
    if arm.arm == task.reference.arm:
        return INK
    return PEER if arm.peer else COLOURS[0]


def _single(title: str, *, height: float) -> tuple[Figure, Axes]:
    """A figure with one panel."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    axes.set_title(title)
    return figure, axes


def _panels(title: str, count: int) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels on shared axes."""
    import matplotlib.pyplot as plt

    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(WIDTH, 0.6 + 1.9 * rows), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=9)
    panels = list(grid.flat)
    for empty in panels[count:]:
        empty.set_visible(False)
    for axes in panels[max(0, count - columns) : count]:  # panels without a panel below
        axes.tick_params(labelbottom=True)
    return figure, panels[:count]


def _title(axes: Axes, arm: ArmSummary, colour: str, note: str) -> None:
    axes.set_title(arm.arm, color=colour, fontweight="bold")
    axes.set_title(note, loc="right", color=colour, fontsize=8)


def _key(figure: Figure, task: TaskSummary, *, reference: bool = True) -> None:
    """Explain the colours in one line at the bottom."""
    words = [(f"black: {task.reference.arm}, the reference", INK)] if reference else []
    words += [("orange: peers (published methods)", PEER), ("blue: ours and controls", COLOURS[0])]
    figure.supxlabel("      ".join(text for text, _ in words), fontsize=8, color=GREY)
