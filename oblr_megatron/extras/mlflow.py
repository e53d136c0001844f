"""MLflow, through mlflow-skinny. MLFLOW_TRACKING_URI names the server; without it the files are in RUN_DIR/mlflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from oblr_megatron.formatting import flatten
from oblr_megatron.observe.trackers.base import DEFAULT_PROJECT, State, TrackedRun, Tracker

STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
BATCH = 100  # params that a server takes at once
LONGEST = 6000  # characters of a param
FORBIDDEN = re.compile(r"[^\w\-. :/]")  # in MLflow's names


class MlflowTracker(Tracker):
    """One MLflow run; see `Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run.run_dir / "mlflow").resolve().as_uri()
        if urlsplit(uri).scheme in ("", "file"):  # from 3.13 on, MLflow asks for consent to its file store
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri)
        if run.id is not None:
            self._id = run.id
            self._client.update_run(self._id, status="RUNNING")
        else:
            experiment = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
            stored = self._client.get_experiment_by_name(experiment)
            place = self._client.create_experiment(experiment) if stored is None else stored.experiment_id
            self._id = self._client.create_run(place, run_name=run.name).info.run_id
            run.remember(self._id)
        known = self._client.get_run(self._id).data.params  # MLflow never changes them
        values = {allowed(key): str(value)[:LONGEST] for key, value in flatten(run.config).items()}
        params = [Param(key, value) for key, value in values.items() if key not in known]
        for first in range(0, len(params), BATCH):
            self._client.log_batch(self._id, params=params[first : first + BATCH])
        self._client.log_dict(self._id, run.config, "config.json")  # this attempt's

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self._id, [Metric(allowed(name), value, now, step) for name, value in values.items()])

    def alarm(self, step: int, name: str, text: str) -> None:
        """See `Tracker.alarm`. A tag of the run."""
        self._client.set_tag(self._id, f"alarm.{name}", f"step {step}: {text}")

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """See `Tracker.table`. An artifact a step."""
        data = {column: [row[place] for row in rows] for place, column in enumerate(columns)}
        self._client.log_table(self._id, data, f"evaluations/{allowed(name)}/step_{step:06}.json")

    def file(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def close(self, state: State) -> None:
        self._client.set_terminated(self._id, status=STATES[state])


def allowed(name: str) -> str:
    """A name as MLflow takes it: it is also a relative path, in which every part counts.

    Example: "val-core/aime/acc/mean@8" -> "val-core/aime/acc/mean_at_8", "pool//data/mean" -> "pool/_/data/mean"
    """
    parts = FORBIDDEN.sub("_", name.replace("@", "_at_")).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
