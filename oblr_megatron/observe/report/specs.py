"""Descriptions of the report's charts. A panel is described by metrics, then filled with the values of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from oblr_megatron.observe.report.history import Array

CurveKind = Literal["cloud", "average", "dots", "line", "marks"]


@dataclass(frozen=True, slots=True)
class Curve:
    """One series of a panel.

    Kinds: "cloud" shows single steps as faint points, with a running average; "average" only the running average;
    "dots" only the points, for values that must not be averaged; "line" the logged values; "marks" a line with a mark
    at each value.
    """

    metric: str
    label: str
    kind: CurveKind = "cloud"
    colour: int = 1  # palette position
    steps: Array = field(default_factory=lambda: np.empty(0))  # [n], filled in from a run
    values: Array = field(default_factory=lambda: np.empty(0))  # [n], finite


@dataclass(frozen=True, slots=True)
class ChartRule:
    """A horizontal line with a label; drawn if the axis reaches it, or always if `forced`."""

    label: str
    value: float = math.nan
    forced: bool = False
    setting: str = ""  # config key of the value


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that share a vertical axis; left out when none of them was logged. Made by `panel` and `strip`."""

    unit: str
    curves: Sequence[Curve]
    log: bool = False
    include: tuple[float, ...] = ()  # values the axis must reach
    rules: Sequence[ChartRule] = ()
    short: bool = False  # a low strip below the main panel
    scale: float = 1.0  # from the metric's unit to the panel's


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: what it shows, and what in it is a reason to look closer. Made by `chart`."""

    title: str
    caption: str
    alarming: str
    panels: Sequence[Panel]
    optional: bool = False  # not named among the missing charts if none of its metrics was logged


def panel(unit: str, *curves: Curve, **options: Any) -> Panel:
    """A panel of full height."""
    return Panel(unit, curves, **options)


def strip(unit: str, *curves: Curve, **options: Any) -> Panel:
    """A low panel below the main one."""
    return Panel(unit, curves, short=True, **options)


def chart(title: str, caption: str, alarming: str, *panels: Panel, optional: bool = False) -> Chart:
    """A chart with its panels from top to bottom."""
    return Chart(title, caption, alarming, panels, optional)
