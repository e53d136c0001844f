"""Descriptions of the report's charts, before the values of a run are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oblr_megatron.observe.report.chart import Kind, Rule


@dataclass(frozen=True, slots=True)
class CurveSpec:
    """A curve: which metric, and how it is drawn."""

    metric: str
    label: str
    kind: Kind = "cloud"
    colour: int = 1


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """A panel; left out when none of its curves was logged. Made by `panel` and `strip`."""

    unit: str
    curves: Sequence[CurveSpec]
    log: bool = False
    include: tuple[float, ...] = ()
    rules: Sequence[Rule | tuple[str, str]] = ()  # a Rule, or (config key, label)
    short: bool = False
    scale: float = 1.0  # from the metric's unit to the panel's


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """A chart: what it shows, and what in it is a reason to look closer. Made by `chart`."""

    title: str
    caption: str
    alarming: str
    panels: Sequence[PanelSpec]


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under a heading."""

    title: str
    charts: Sequence[ChartSpec]


def panel(unit: str, *curves: CurveSpec, **options: Any) -> PanelSpec:
    """A panel of full height."""
    return PanelSpec(unit, curves, **options)


def strip(unit: str, *curves: CurveSpec, **options: Any) -> PanelSpec:
    """A low panel below the main one."""
    return PanelSpec(unit, curves, short=True, **options)


def chart(title: str, caption: str, alarming: str, *panels: PanelSpec) -> ChartSpec:
    """A chart with its panels from top to bottom."""
    return ChartSpec(title, caption, alarming, panels)
