"""Choose an arm's shape (Q, G) and learning rate: the best cell of a grid that grows and is refined at its best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Cell(NamedTuple):
    """What a sweep chooses. Example: Cell(64, 1, 1e-3), written "64x1/lr0.001"."""

    num_prompts: int  # Q
    group_size: int  # G
    lr: float

    @property
    def shape(self) -> str:
        """Example: "64x1"."""
        return f"{self.num_prompts}x{self.group_size}"

    def __str__(self) -> str:
        return f"{self.shape}/lr{self.lr:g}"

    @classmethod
    def parse(cls, text: str) -> Cell:
        """The cell that `str` wrote."""
        shape, _, rate = text.partition("/lr")
        num_prompts, _, group_size = shape.partition("x")
        return cls(int(num_prompts), int(group_size), float(rate))


@dataclass(frozen=True, slots=True)
class Choice:
    """State of a sweep over rates. Example: Choice(rates=(3e-4, 1e-3), missing=(), best=1e-3, on_edge=True)."""

    rates: tuple[float, ...]  # the grid with its extensions and refinements, ascending
    missing: tuple[float, ...]  # rates without a result
    best: float | None  # None while rates are missing, or if every rate failed
    on_edge: bool  # the best rate is the smallest or largest, and the grid may not grow further


@dataclass(frozen=True, slots=True)
class Selection:
    """State of a sweep over shapes and rates."""

    cells: tuple[Cell, ...]  # the cells that the sweep needs so far
    best: Cell | None  # None while cells are missing, or if every cell failed
    on_edge: bool  # the best rate lies on the edge of its grid


def select(
    shapes: Sequence[tuple[int, int]],
    grid: Sequence[float],
    extensions: int,
    refinements: int,
    means: Mapping[Cell, float],
) -> Selection:
    """The cells to run next, or the cell with the largest mean area under the curve.

    Every shape has its own sweep over rates. Only the best shape's grid is then refined. A single cell needs no sweep.

    Args:
        shapes: (Q, G) of equal numbers of samples.
        grid: rates, ascending.
        extensions: largest number of rates to add to the grid of each shape.
        refinements: rounds of finer rates, see `choose`.
        means: cell -> mean area over the sweep's seeds. NaN marks a cell with a failed run; it is never the best.
    """
    if len(shapes) == len(grid) == 1:
        cell = Cell(*shapes[0], grid[0])
        return Selection((cell,), cell, False)
    by_shape = {shape: {cell.lr: mean for cell, mean in means.items() if cell[:2] == shape} for shape in shapes}
    found = {shape: choose(grid, extensions, by_shape[shape]) for shape in shapes}
    best = None
    if not any(choice.missing for choice in found.values()):
        heights = {shape: by_shape[shape][choice.best] for shape, choice in found.items() if choice.best is not None}
        best = max(heights, key=lambda shape: heights[shape], default=None)
    if best is not None:
        found[best] = choose(grid, extensions, by_shape[best], refinements)
    cells = tuple(Cell(*shape, rate) for shape in shapes for rate in found[shape].rates)
    if best is None or (rate := found[best].best) is None:
        return Selection(cells, None, False)
    return Selection(cells, Cell(*best, rate), found[best].on_edge)


def choose(grid: Sequence[float], extensions: int, means: Mapping[float, float], refinements: int = 0) -> Choice:
    """The rates to run next, or the rate with the largest mean area under the curve.

    Args:
        grid: rates, ascending. A grid of one rate does not grow.
        extensions: largest number of rates to add while the best rate lies on the edge.
        means: rate -> mean area over the sweep's seeds. NaN marks a rate with a failed run; it is never the best.
        refinements: rounds that add the geometric means of the best rate and its neighbours.
    """
    rates = tuple(grid)
    while True:
        missing = tuple(rate for rate in rates if rate not in means)
        known = {rate: means[rate] for rate in rates if rate in means and not math.isnan(means[rate])}
        if missing or not known:
            return Choice(rates, missing, None, False)
        best = max(known, key=lambda rate: known[rate])
        on_edge = len(rates) > 1 and best in (rates[0], rates[-1])
        if on_edge and len(rates) < len(grid) + extensions:
            rates = extended(rates, upwards=best == rates[-1])
        elif refinements:
            place = rates.index(best)
            between = {refined(best, rate) for rate in rates[max(0, place - 1) : place + 2] if rate != best}
            rates, refinements, extensions = tuple(sorted({*rates, *between})), refinements - 1, 0
        else:
            return Choice(rates, (), best, on_edge)


def refined(one: float, other: float) -> float:
    """The geometric mean, rounded to three digits.

    >>> refined(5e-4, 1e-3)
    0.000707
    """
    return float(f"{math.sqrt(one * other):.3g}")


def extended(rates: tuple[float, ...], *, upwards: bool) -> tuple[float, ...]:
    """Add one rate at an end, with the ratio of the two rates there, rounded to three digits.

    >>> extended((3e-4, 1e-3), upwards=True), extended((3e-4, 1e-3), upwards=False)
    ((0.0003, 0.001, 0.00333), (9e-05, 0.0003, 0.001))
    """
    if upwards:
        return (*rates, float(f"{rates[-1] * rates[-1] / rates[-2]:.3g}"))
    return (float(f"{rates[0] * rates[0] / rates[1]:.3g}"), *rates)
