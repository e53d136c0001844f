"""Draws a panel of curves, or a stack of layers, as inline SVG with HTML labels.

The SVG holds only shapes and stretches to its box. Labels are HTML placed in percent, so text keeps its size at any
width. Colours are CSS classes (s1, s2, ...) that the page's theme defines. `data-*` attributes hold the values that the
page's script shows under the pointer; charts are readable without scripts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from oblr_megatron.formatting import duration, number, scientific
from oblr_megatron.observe.report.axes import Axis, linear_axis, log_axis
from oblr_megatron.observe.report.history import Array, smooth, thinned
from oblr_megatron.observe.report.specs import ChartRule, Curve, Panel

CANVAS = 1000.0  # width and height in SVG units
MOST_BINS = 50  # steps of a stack are averaged in at most this many bins


@dataclass(frozen=True, slots=True)
class Frame:
    """The two axes of a plot."""

    horizontal: Axis
    vertical: Axis

    def path(self, steps: Array, values: Array) -> str:
        """SVG path of a line through the points."""
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in self._places(steps, values))

    def dots(self, steps: Array, values: Array) -> str:
        """SVG path of separate points: tiny strokes that show as dots because of their round ends."""
        return "".join(f"M{x:.0f} {y:.0f}h.01" for x, y in self._places(steps, values))

    def across(self, value: float) -> str:
        """SVG path of a horizontal line over the full width."""
        return f"M0 {10 * self.top(value):.1f}H{CANVAS:g}"

    def top(self, value: float) -> float:
        """Distance of a value from the upper edge, percent."""
        return float(100 * (1 - self.vertical.place(np.array([value]))[0]))

    def _places(self, steps: Array, values: Array) -> list[tuple[float, float]]:
        x, y = self.horizontal.place(steps) * CANVAS, (1 - self.vertical.place(values)) * CANVAS
        return [(float(a), float(b)) for a, b in zip(x, y, strict=True)]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A legend entry: its key, the value shown by default, and the values shown under the pointer."""

    label: str
    key: str  # CSS classes
    resting: str
    steps: Array
    texts: list[str]


def draw_panel(panel: Panel, horizontal: Axis, step_labels: bool) -> str:
    """Legend and plot of one panel.

    Args:
        panel: at least one of its curves has a value.
        horizontal: from step_axis.
        step_labels: write step numbers below; for the lowest panel of a chart.
    """
    frame = Frame(horizontal, _vertical_axis(panel))
    rules = [rule for rule in panel.rules if frame.vertical.low <= rule.value <= frame.vertical.high]
    shapes = "".join(f'<path class="rule" d="{frame.across(rule.value)}"/>' for rule in rules)
    shapes += "".join(_cloud(curve, frame, panel.log) for curve in panel.curves if curve.kind in ("cloud", "dots"))
    entries = []
    for curve in panel.curves:
        steps, values = thinned(*line_of(curve, panel.log), limit=100 if curve.kind == "average" else 400)
        shapes += _line(curve, steps, values, frame) if curve.kind != "dots" else ""
        texts = [number(float(value)) for value in values]
        key = f"{'dot' if curve.kind in ('marks', 'dots') else 'stroke'} s{curve.colour}"
        entries.append(LegendEntry(curve.label, key, texts[-1], steps, texts))
    labels = "".join(_rule_label(rule, frame) for rule in rules)
    return _assembled(frame, panel.unit, entries, shapes, labels, short=panel.short, step_labels=step_labels)


def draw_stack(layers: Mapping[str, Array], steps: Array, horizontal: Axis, *, step_labels: bool) -> str:
    """Layers on top of each other, averaged over bins of steps.

    Args:
        layers: [n] seconds by label, not negative; the colour follows the position.
        steps: [n] rising.
        horizontal: from step_axis.
        step_labels: write step numbers below.
    """
    edges = np.linspace(0, len(steps), min(len(steps), MOST_BINS) + 1).round().astype(int)
    seconds = np.stack(list(layers.values()))  # [layers, n]
    means = np.stack([seconds[:, start:end].mean(axis=1) for start, end in pairwise(edges)], axis=1)
    rights = steps[edges[1:] - 1]
    sides = np.stack((np.concatenate(([steps[0] - 1], rights[:-1])), rights), axis=1).ravel()
    tops = np.vstack((np.zeros(means.shape[1]), np.cumsum(means, axis=0))).repeat(2, axis=1)
    frame = Frame(horizontal, linear_axis(0.0, float(tops.max()), 5))
    shapes, entries = "", []
    for index, label in enumerate(layers):
        outline = frame.path(np.append(sides, sides[::-1]), np.append(tops[index + 1], tops[index][::-1]))
        shapes += f'<path class="layer s{index + 1}" d="{outline}Z"/>'
        texts = [duration(float(mean)) for mean in means[index]]
        entries.append(LegendEntry(label, f"block s{index + 1}", duration(float(seconds[index].mean())), rights, texts))
    return _assembled(frame, "s", entries, shapes, step_labels=step_labels)


def line_of(curve: Curve, log: bool) -> tuple[Array, Array]:
    """The running average or the values of a curve; on a logarithmic axis only the positive ones."""
    values = smooth(curve.values) if curve.kind in ("cloud", "average") else curve.values
    drawn = values > 0 if log else np.isfinite(values)
    return curve.steps[drawn], values[drawn]


def _vertical_axis(panel: Panel) -> Axis:
    """Axis over the data's range, without outliers that would flatten everything else."""
    ends: list[float] = [*panel.include, *(rule.value for rule in panel.rules if rule.forced)]
    for curve in panel.curves:
        values = line_of(curve, panel.log)[1]
        if curve.kind == "dots":
            values = _without_outliers(values)
        elif curve.kind == "cloud":
            values = np.append(values, _without_outliers(curve.values[curve.values > 0] if panel.log else curve.values))
        ends += [float(values.min()), float(values.max())]
    make, intervals = (log_axis if panel.log else linear_axis), (2 if panel.short else 5)
    return make(min(ends), max(ends), intervals)


def _without_outliers(values: Array) -> Array:
    """[n] -> [m] values in the middle 96 percent, or no farther from it than its width."""
    if len(values) == 0:
        return values
    low, high = np.quantile(values, (0.02, 0.98))
    return values[(values >= low - (high - low)) & (values <= high + (high - low))]


def _cloud(curve: Curve, frame: Frame, log: bool) -> str:
    drawn = curve.values > 0 if log else np.isfinite(curve.values)
    steps, values = thinned(curve.steps[drawn], curve.values[drawn], limit=900, extremes=20)
    return f'<path class="cloud s{curve.colour}" d="{frame.dots(steps, values)}"/>'


def _line(curve: Curve, steps: Array, values: Array, frame: Frame) -> str:
    """The line, with marks if the kind asks for them or a single value would be invisible."""
    shapes = f'<path class="line s{curve.colour}" d="{frame.path(steps, values)}"/>'
    if curve.kind == "marks" or len(steps) == 1:
        shapes += f'<path class="mark s{curve.colour}" d="{frame.dots(steps, values)}"/>'
    return shapes


def _value_labels(frame: Frame) -> str:
    ticks = [float(f"{tick:.9g}") for tick in frame.vertical.ticks]  # 0.30000000000000004 -> 0.3
    digits = next((few for few in range(3, 9) if all(float(f"{tick:.{few}g}") == tick for tick in ticks)), 9)
    texts = [number(tick) if digits == 3 else f"{tick:,.{digits}g}" for tick in ticks]
    if any("e-" in text for text in texts):  # one notation on one axis
        texts = [scientific(tick, digits) for tick in ticks]
    return "".join(
        f'<span class="y" style="top:{frame.top(tick):.2f}%">{text}</span>'
        for tick, text in zip(ticks, texts, strict=True)
    )


def _step_labels(horizontal: Axis) -> str:
    lefts = 100 * horizontal.place(np.array(horizontal.ticks))
    return "".join(
        f'<span class="x" style="left:{left:.2f}%">{tick:,.0f}</span>'
        for left, tick in zip(lefts, horizontal.ticks, strict=True)
    )


def _rule_label(rule: ChartRule, frame: Frame) -> str:
    top = frame.top(rule.value)
    side = "under" if top < 12 else "over"
    return f'<span class="rule-label {side}" style="top:{top:.2f}%">{escape(rule.label)}</span>'


def _assembled(
    frame: Frame,
    unit: str,
    entries: Sequence[LegendEntry],
    shapes: str,
    labels: str = "",
    *,
    short: bool = False,
    step_labels: bool,
) -> str:
    """Legend above plot; the plot with its grid, and the numbers at its axes."""
    legend = "".join(
        f'<span class="entry"><i class="key {entry.key}"></i>{escape(entry.label)} '
        f"<b>{escape(entry.resting)}</b></span>"
        for entry in entries
    )
    readout = [{"x": [int(step) for step in entry.steps], "y": entry.texts} for entry in entries]
    data = escape(json.dumps(readout, ensure_ascii=False, separators=(",", ":")))
    name = escape(", ".join(entry.label for entry in entries))
    grid = "".join(frame.across(tick) for tick in frame.vertical.ticks)
    steps = _step_labels(frame.horizontal) if step_labels else ""
    classes = "plot" + (" short" if short else "") + (" labelled" if step_labels else "")
    return (
        f'<div class="panel"><div class="legend">{legend}<span class="unit">{escape(unit)}</span></div>'
        f'<div class="{classes}" data-last="{frame.horizontal.high:g}" data-curves="{data}">'
        f'<svg viewBox="0 0 {CANVAS:g} {CANVAS:g}" preserveAspectRatio="none" role="img" aria-label="{name}">'
        f'<path class="grid" d="{grid}"/>{shapes}</svg>{_value_labels(frame)}{labels}{steps}</div></div>'
    )
