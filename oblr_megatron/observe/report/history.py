"""Reads a run directory: metrics.jsonl as arrays by name, config.json and environment.json by dotted key."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oblr_megatron.errors import UserError
from oblr_megatron.metrics import ENVIRONMENT_FILE, Record, read_metrics

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RunHistory:
    """The logged data of a run so far; only the metrics must exist."""

    directory: Path
    records: list[Record]
    config: dict[str, Any]
    environment: dict[str, Any]

    @cached_property
    def steps(self) -> Array:
        """[records] step of each record."""
        return self.values("step")

    @property
    def last_step(self) -> int:
        return int(self.steps[-1])

    def values(self, name: str) -> Array:
        """[records] values of a metric, NaN where it was not logged or not finite."""
        return np.array([record.get(name) for record in self.records], dtype=np.float64)

    def points(self, name: str) -> tuple[Array, Array]:
        """[n], [n] steps and values of a metric where it has a value."""
        values = self.values(name)
        known = np.isfinite(values)
        return self.steps[known], values[known]

    def evaluation_sets(self) -> list[str]:
        """Names of the evaluated sets, in order of appearance."""
        names = (name for record in self.records for name in record if name.startswith("eval/"))
        return list(dict.fromkeys(name.removeprefix("eval/").rpartition("/")[0] for name in names))

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the resolved config. Example key: "optimizer.lr"."""
        table: Any = self.config
        for part in key.split("."):
            if not isinstance(table, dict) or part not in table:
                return default
            table = table[part]
        return table


def load_history(run_dir: Path) -> RunHistory:
    """Read the directory of a finished, running or interrupted run.

    Raises:
        UserError: no metrics, no logged step, or a file that is not JSON.
    """
    directory = Path(run_dir)
    records = read_metrics(directory)
    if not records:
        raise UserError("the run has logged no step yet", where=str(directory), fix="wait for the first step")
    config = _read_json(directory / "config.json")
    return RunHistory(directory.resolve(), records, config, _read_json(directory / ENVIRONMENT_FILE))


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} if the file is absent, because the report is still useful without it."""
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"not a JSON file: {error}", where=str(path), fix="restore or remove the file") from error
    return table if isinstance(table, dict) else {}


def smooth(values: Array) -> Array:
    """Centred Gaussian running average with a standard deviation of 1/30 of the series.

    Series of fewer than 20 values are returned unchanged.
    """
    count = len(values)
    if count < 20:
        return values
    width = max(1.5, count / 30)
    reach = int(3 * width)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    weight = np.convolve(np.ones(count), kernel)[reach : reach + count]
    return np.convolve(values, kernel)[reach : reach + count] / weight


def thinned(steps: Array, values: Array, limit: int, extremes: int = 0) -> tuple[Array, Array]:
    """At most `limit` points: evenly spaced ones, the ends included, and the `extremes` largest and smallest values."""
    if len(steps) <= limit:
        return steps, values
    even = np.linspace(0, len(steps) - 1, limit - 2 * extremes).round().astype(int)
    order = np.argsort(values)
    index = np.unique(np.concatenate((even, order[:extremes], order[len(order) - extremes :])))
    return steps[index], values[index]
