"""Draw the charts of a study of curves, as SVG and PNG, at the width of a README.

Every arm has a panel, with the reference in black.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from studies.plotting import COLOURS, GREY, INK, PEER, WIDTH, save, styled
from studies.statistics import t_interval
from studies.summary import ArmSummary, TaskSummary, area
from studies.tables import compared

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4
SIGNIFICANT = 0.05
RATIO_TICKS = (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 10)
BOUND_MARKERS = {"": "o", ">": ">", "<": "<", "~": "x"}


def write_charts(tasks: Sequence[TaskSummary], out: Path) -> list[Path]:
    """Write `savings`, and `curves_TASK` of every task that has runs; returns their paths."""
    paths = save(draw_savings(tasks), out / "savings") if compared(tasks) else []
    for task in tasks:
        paths += save(draw_curves(task), out / f"curves_{task.task}") if task.seen else []
    return paths


@styled()
def draw_curves(task: TaskSummary) -> Figure:
    """Accuracy by training samples: mean over seeds with its 95% interval."""
    title = f"{task.task}: held-out accuracy by training samples, mean over seeds and its 95% interval"
    figure, panels = _panels(f"{title}; right: area under the mean", len(task.seen))
    for axes, arm in zip(panels, task.seen, strict=True):
        if task.reference.runs and arm is not task.reference:
            _curve(axes, task.reference, INK, band=False)
        _curve(axes, arm, _role(task, arm), band=True)
        _title(axes, arm, _role(task, arm), f"{arm.of(area).mean():.3f}")
    _key(figure, task)
    return figure


def _curve(axes: Axes, arm: ArmSummary, colour: str, *, band: bool) -> None:
    """Draw the mean curve and, with `band`, its interval."""
    values = np.array([run.accuracy for run in arm.runs])  # [seeds, n]
    run, mean = arm.runs[0], values.mean(axis=0)
    steps = run.steps * (run.budget / run.num_steps)  # in samples
    axes.plot(steps, mean, color=colour, linewidth=1.8 if band else 1.0, zorder=3 if band else 2)
    if band and len(arm.runs) > 1:
        intervals = [t_interval(column) for column in values.T]
        low, high = ([getattr(interval, end) for interval in intervals] for end in ("low", "high"))
        axes.fill_between(steps, low, high, color=colour, alpha=0.16, linewidth=0, zorder=2.5)


@styled()
def draw_savings(tasks: Sequence[TaskSummary]) -> Figure:
    """The best peer's samples to the target divided by the reference's, for each task.

    A bound (`TaskSummary.bound`) has an arrow for its mean, and no interval on its open side. Grey: p of the ratio is
    above 0.05.
    """
    pairs = list(reversed(compared(tasks)))
    name = pairs[0][1].arm
    title = f"Samples to the target: the best peer's, divided by {name}'s (mean over seeds and its 95% interval)"
    figure, axes = _single(title, height=1.3 + 0.34 * len(pairs))
    axes.axvline(1, color=INK, linewidth=1)
    for row, (task, ours, peer) in enumerate(pairs):
        test, bound = task.saving(ours, peer), task.bound(ours, peer)
        interval = test.interval
        low = interval.mean if bound in ("<", "~") else interval.low
        high = interval.mean if bound in (">", "~") else interval.high
        sure = test.p <= SIGNIFICANT  # with few seeds the interval may exclude 1 although the test does not
        fewer, more = sure and low > 1 and bound in ("", ">"), sure and high < 1 and bound in ("", "<")
        colour = COLOURS[0] if fewer else PEER if more else GREY
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
        f"right of 1: {name} needs fewer samples (blue); left: more (orange); grey: p > {SIGNIFICANT}\n"
        "arrow right: at least; left: at most"
    )
    return figure


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


def _key(figure: Figure, task: TaskSummary) -> None:
    """Explain the colours in one line at the bottom."""
    words = (
        f"black: {task.reference.arm}, the reference",
        "orange: peers (published methods)",
        "blue: ours and controls",
    )
    figure.supxlabel("      ".join(words), fontsize=8, color=GREY)
