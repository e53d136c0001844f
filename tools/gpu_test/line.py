"""A line of the table: what it measures, what it needs, what it expects, how long it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

Figures = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class Bound:
    """Limits of the figures that a pattern names. Example: Bound("step / plain, stash, *", high=1.1)"""

    pattern: str  # of figures, as fnmatch reads it
    low: float | None = None
    high: float | None = None
    optional: bool = False  # the figure may be absent: a part of the line can be impossible on this GPU

    def __str__(self) -> str:
        if self.low is not None and self.low == self.high:
            return f"{self.pattern} = {self.low:g}"
        limits = ((">=", self.low), ("<=", self.high))
        return f"{self.pattern} " + " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)

    def found(self, figures: Figures) -> dict[str, float]:
        """The figures that the pattern names."""
        return {
            name: value
            for name, value in figures.items()
            if isinstance(value, int | float) and fnmatchcase(name, self.pattern)
        }

    def broken(self, figures: Figures) -> list[str]:
        """Descriptions of figures outside the limits, e.g. "step / plain, stash, qwen3-8b, 512 tokens = 1.31"."""
        return [f"{name} = {value:.4g}" for name, value in self.found(figures).items() if not self._holds(value)]

    def _holds(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Example: Line(name="4b", title="cuDNN plans", measure="kernels:plans", needs=("CUDA",), bounds=(...))."""

    name: str
    title: str
    measure: str  # "module:function", called with a Report and the arguments; a name without dots is of this package
    needs: tuple[str, ...] = ()  # names in needs.NEEDS
    bounds: tuple[Bound, ...] = ()
    minutes: float = 5  # the line is ended after this
    arguments: Mapping[str, Any] = field(default_factory=dict)  # replace the function's defaults, which are for a GPU
    rehearsal: Mapping[str, Any] = field(default_factory=dict)  # replace both in a rehearsal on a CPU

    def lacks(self, missing: Figures) -> list[str]:
        """What this machine lacks, from the figures of `needs.probe`; "" is there."""
        reasons = (missing.get(need, f"{need} (the machine could not be examined)") for need in self.needs)
        return [str(reason) for reason in reasons if reason]

    def judge(self, figures: Figures) -> tuple[str, str]:
        """(verdict, why) of a line that ended by itself: "ok", "not met", or "failed" if a figure is missing."""
        absent = [bound.pattern for bound in self.bounds if not bound.optional and not bound.found(figures)]
        if absent:
            return "failed", f"no figure {absent[0]!r}"
        broken = [text for bound in self.bounds for text in bound.broken(figures)]
        return ("not met", "; ".join(broken)) if broken else ("ok", "")
