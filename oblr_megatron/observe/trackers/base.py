"""The interface of trackers, and the facts about the run that they get."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oblr_megatron.metrics.files import write_whole

FOLDER = "trackers"  # in the run directory
DEFAULT_PROJECT = "oblr-megatron"
State = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker follows.

    Example: TrackedRun("wandb", Path("runs/sums"), "sums", None, {"num_steps": 100, "algo": {...}}, resume_step=None)
    """

    tracker: str  # name in log.trackers
    run_dir: Path
    name: str
    project: str | None  # log.project
    config: dict[str, Any]  # the resolved configuration as JSON
    resume_step: int | None
    """Last step of the checkpoint that the run continues from; -1 for a resume without one, None for a new run."""

    @property
    def id_file(self) -> Path:
        """Holds the tracker's own id of this run, so that a requeued job continues it."""
        return self.run_dir / FOLDER / f"{self.tracker}.json"

    @property
    def id(self) -> str | None:
        """The id of an earlier attempt; None for a new run."""
        if self.resume_step is None or not self.id_file.exists():
            return None
        return str(json.loads(self.id_file.read_text(encoding="utf-8"))["id"])

    def remember(self, run_id: str) -> None:
        """Keep the tracker's id of this run in the run directory."""
        self.id_file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.id_file, json.dumps({"id": run_id}) + "\n")


class Tracker(ABC):
    """One tracker of one run, in a process of its own. An exception of a method loses that record only.

    Args:
        run: the run. A tracker that can continue a run stores its id with `run.remember` and reads `run.id`.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.run = run

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The finite metrics of a step by their tracker names (names.py). Steps after a resume may come again."""

    def alarm(self, step: int, name: str, text: str) -> None:
        """An alarm, once. Nothing by default."""
        del step, name, text

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Responses of an evaluation; `name` is the set's. Nothing by default."""
        del step, name, columns, rows

    def file(self, path: Path) -> None:
        """A file of the run, e.g. report.html. Nothing by default."""
        del path

    def close(self, state: State) -> None:
        """The run has ended. Nothing by default."""
        del state
