"""Metrics of an evaluation as output: one line and one table row per set, and JSON."""

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
    """Metrics of one set. Example: SetReport(name="gsm8k", prompts=1319, k=8, metrics={"accuracy": Estimate(...)},
    response_length=212.3, truncated_fraction=0.01)
    """

    name: str
    prompts: int
    k: int
    metrics: Mapping[str, Estimate]  # by the names of `accuracy.by_prompt`
    response_length: float  # tokens
    truncated_fraction: float
    unscored: int = 0  # responses that could not be scored; they count as wrong

    @classmethod
    def of(cls, name: str, grades: Grades) -> SetReport:
        """Compute the metrics."""
        return cls(name, len(grades.greedy), grades.k, estimates(grades), **lengths(grades), unscored=grades.unscored)

    @property
    def columns(self) -> list[str]:
        """The metrics shown in line and table; of pass@k only k = K."""
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
        line = f"{self.name}: {', '.join(parts)} on {self.prompts} prompts"
        return f"{line}; {self.unscored} responses unscored" if self.unscored else line

    def record(self) -> dict[str, Any]:
        """All metrics with their intervals, as plain JSON."""
        return {
            "prompts": self.prompts,
            "k": self.k,
            **{name: asdict(metric) for name, metric in self.metrics.items()},
            "response_length": self.response_length,
            "truncated_fraction": self.truncated_fraction,
            **({"unscored": self.unscored} if self.unscored else {}),
        }


SHORT_NAME = 16
"""Set names up to this length are not wrapped."""


def table(reports: Sequence[SetReport]) -> Table:
    """One row per set: each metric above its interval. The last column is shown if a response is unscored."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    shown.add_column("set", overflow="fold", min_width=min(SHORT_NAME, max(len(one.name) for one in reports)))
    unscored = any(one.unscored for one in reports)
    for name in ("prompts", *reports[0].columns, "truncated", "tokens", *(["unscored"] if unscored else [])):
        shown.add_column(name, justify="right", no_wrap=True)
    for one in reports:
        metrics = [_cell(one.metrics.get(name)) for name in one.columns]
        ends = [f"{one.truncated_fraction:.1%}", f"{one.response_length:.1f}"]
        ends += [f"{one.unscored:,}"] if unscored else []
        shown.add_row(one.name, f"{one.prompts:,}", *metrics, *ends)
    return shown


def _cell(metric: Estimate | None) -> str:
    """The value, and below it the interval, in percent."""
    if metric is None:
        return MISSING
    return f"{metric.value:.1%}\n[dim]{100 * metric.low:.1f}–{100 * metric.high:.1f}[/dim]"  # noqa: RUF001
