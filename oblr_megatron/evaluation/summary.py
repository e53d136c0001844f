"""An evaluation's figures for people and for programs: a line and a table row a set, and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from oblr_megatron.evaluation.accuracy import Estimate, Grades, estimates, lengths
from oblr_megatron.formatting import MISSING


@dataclass(frozen=True, slots=True)
class SetReport:
    """One set. Example: SetReport(name="gsm8k", prompts=1319, k=8, figures={"accuracy": Estimate(...), "mean@8": ...},
    response_length=212.3, truncated_fraction=0.01)
    """

    name: str
    prompts: int
    k: int
    metrics: Mapping[str, Estimate]  # see `figures.by_prompt`
    response_length: float  # tokens
    truncated_fraction: float

    @classmethod
    def of(cls, name: str, grades: Grades) -> SetReport:
        """Compute everything."""
        return cls(name, len(grades.greedy), grades.k, estimates(grades), **lengths(grades))

    @property
    def columns(self) -> list[str]:
        """The figures that people are shown: of pass@k that of all samples."""
        sampled = [f"{name}@{self.k}" for name in ("mean", "pass", "maj")]
        return ["accuracy", *(name for name in sampled if self.k)]

    def line(self) -> str:
        """One line of plain text.

        Example: "amc: accuracy 81.0% (78.8% to 83.0%) greedy, mean@8 79.2%, pass@8 93.1%, maj@8 84.9% on 83 prompts"
        """
        accuracy, *sampled = (name for name in self.columns if name in self.metrics)
        greedy = self.metrics[accuracy]
        parts = [f"{accuracy} {greedy.value:.1%} ({greedy.low:.1%} to {greedy.high:.1%}) greedy"]
        parts += [f"{name} {self.metrics[name].value:.1%}" for name in sampled]
        return f"{self.name}: {', '.join(parts)} on {self.prompts} prompts"

    def record(self) -> dict[str, Any]:
        """Plain JSON: all figures with their intervals."""
        return {
            "prompts": self.prompts,
            "k": self.k,
            **{name: asdict(figure) for name, figure in self.metrics.items()},
            "response_length": self.response_length,
            "truncated_fraction": self.truncated_fraction,
        }


SHORT_NAME = 16
"""A set's name up to this long is not cut over several lines."""


def table(reports: Sequence[SetReport]) -> Table:
    """A row a set: each figure above its interval."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    shown.add_column("set", overflow="fold", min_width=min(SHORT_NAME, max(len(one.name) for one in reports)))
    for name in ("prompts", *reports[0].columns, "truncated", "tokens"):
        shown.add_column(name, justify="right", no_wrap=True)
    for one in reports:
        metrics = [_cell(one.metrics.get(name)) for name in one.columns]
        ends = [f"{one.truncated_fraction:.1%}", f"{one.response_length:.1f}"]
        shown.add_row(one.name, f"{one.prompts:,}", *metrics, *ends)
    return shown


def _cell(figure: Estimate | None) -> str:
    """Value, and under it the interval, in percent."""
    if figure is None:
        return MISSING
    return f"{figure.value:.1%}\n[dim]{100 * figure.low:.1f}–{100 * figure.high:.1f}[/dim]"  # noqa: RUF001
