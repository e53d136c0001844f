"""Section [log]: metrics, console and profiler. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oblr_megatron.config.section import Section


class LogConfig(Section):
    """Where metrics go, besides metrics.jsonl; profiling."""

    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers that get metrics, config, alarms, evaluation tables and the report: "wandb", "mlflow", "trackio",
    "tensorboard", or one of another package. They never stop or delay a step."""
    project: str | None = Field(None, min_length=1)
    """Project (mlflow: experiment) of the run. By default the tracker's own variable, or "oblr-megatron"."""
    run_name: str | None = Field(None, min_length=1)
    """Name of the run in its trackers; by default the name of run_dir."""
    samples: int = Field(0, ge=0)
    """Responses that the console shows after each step: the best, the worst, and others evenly spaced between them by
    reward."""
    profile: Literal["none", "torch", "nsys"] = "none"
    """Profiler. "torch": a trace of the first rank in RUN_DIR/profile. "nsys": ranges and cudaProfilerStart/Stop for
    `nsys profile --capture-range=cudaProfilerApi`."""
    profile_step_start: int = Field(3, ge=0)
    """First profiled step, counted from 0. The first steps of a run are slower than the rest."""
    profile_step_end: int = Field(5, ge=1)
    """First step that is no longer profiled."""
