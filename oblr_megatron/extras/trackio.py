"""trackio: local, or TRACKIO_SPACE_ID, TRACKIO_SERVER_URL. Local files are in TRACKIO_DIR, by default trackio's own."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio

from oblr_megatron.formatting import flatten
from oblr_megatron.observe.trackers.base import DEFAULT_PROJECT, State, TrackedRun, Tracker


class TrackioTracker(Tracker):
    """One trackio run; see `Tracker`. trackio continues runs by name, so the name gets a suffix of its own.

    trackio stores records in a thread, and only warns of a failure. Its warnings become errors of later records.
    """

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._warned: list[str] = []
        show = warnings.showwarning

        def keep(message: Warning | str, *place: Any, **options: Any) -> None:
            if "trackio" in str(message):
                self._warned.append(str(message))
            show(message, *place, **options)

        warnings.showwarning = keep
        warnings.simplefilter("always")
        name = run.id or f"{run.name}-{uuid.uuid4().hex[:6]}"
        config = {key: value for key, value in flatten(run.config).items() if not key.startswith("_")}
        project = run.project or os.environ.get("TRACKIO_PROJECT") or DEFAULT_PROJECT
        self._run = trackio.init(project=project, name=name, config=config, resume="allow", embed=False)
        run.remember(name)  # a warning of `init` is the next record's: trackio sends later what is kept until then

    def log(self, step: int, values: Mapping[str, float]) -> None:
        trackio.log(dict(values), step=step)
        self._raise_warned()

    def alarm(self, step: int, name: str, text: str) -> None:
        trackio.alert(title=f"alarm {name} at step {step}", text=text, level=trackio.AlertLevel.WARN)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        data = [list(row) for row in rows]
        trackio.log({f"evaluations/{name}": trackio.Table(columns=list(columns), data=data)}, step=step)

    def file(self, path: Path) -> None:
        trackio.save(path)

    def close(self, state: State) -> None:
        trackio.finish()
        self._raise_warned()

    def _raise_warned(self) -> None:
        if self._warned:
            raise RuntimeError(self._warned.pop(0))
