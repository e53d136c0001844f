"""Weights & Biases. WANDB_MODE, WANDB_ENTITY, WANDB_BASE_URL, ... keep their meaning; files are in RUN_DIR/wandb."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from oblr_megatron.observe.trackers.base import DEFAULT_PROJECT, State, TrackedRun, Tracker
from oblr_megatron.observe.trackers.names import STEP


class WandbTracker(Tracker):
    """One wandb run; see `Tracker`. The x-axis is STEP: wandb's own step cannot go back after a resume."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._run = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            name=run.name,
            id=run.id or os.environ.get("WANDB_RUN_ID"),
            resume="allow",
            dir=str(run.run_dir),
            config=run.config,
            settings=wandb.Settings(console="off"),
        )
        run.remember(self._run.id)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values))

    def alarm(self, step: int, name: str, text: str) -> None:
        """See `Tracker.alarm`. The run's summary has it as well."""
        self._run.summary[f"alarm/{name}"] = f"step {step}: {text}"
        self._run.alert(title=f"alarm {name} at step {step}", text=text, level="WARN")

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({STEP: step, f"evaluations/{name}": wandb.Table(list(columns), [list(row) for row in rows])})

    def file(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, state: State) -> None:
        """See `Tracker.close`. wandb's service process ends here.

        Raises:
            RuntimeError: the service could not write or send records. wandb reports this only in the service's log.
        """
        log = Path(self._run.settings.log_internal)
        self._run.finish(exit_code=int(state == "failed"))
        wandb.teardown()
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        errors = [line for line in lines if '"level":"ERROR"' in line]
        if errors:
            raise RuntimeError(f"wandb's service had {len(errors):,} errors, e.g. {errors[0]}")
