"""The configuration's section about logs and profiles. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oblr_megatron.config.section import Section


class LogConfig(Section):
    """Where figures go, beside metrics.jsonl."""

    tensorboard: bool = True
    """Write RUN_DIR/tensorboard."""
    console: Literal["auto", "live", "plain"] = "auto"
    """"live": a rich progress display; "plain": a line a step; "auto": live on a terminal."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak TFLOP/s of one device in the training's precision, for perf/mfu; by default that of bf16 or FP8 training on
    the GPUs in observe/performance/hardware.py, and unknown (no perf/mfu) elsewhere."""
    profile: Literal["none", "torch", "nsys"] = "none"
    """Profile steps profile_step_start to profile_step_end: with torch's profiler, a trace a rank in RUN_DIR/profile;
    or with ranges and cudaProfilerStart/Stop for `nsys profile --capture-range=cudaProfilerApi`."""
    profile_step_start: int = Field(3, ge=0)
    """First step profiled, counted from 0 (Megatron's name). The first steps of a run are slower than the others."""
    profile_step_end: int = Field(5, ge=1)
    """The step before which profiling ends."""
    profile_ranks: tuple[int, ...] = Field((0,), min_length=1)
    """Ranks that are profiled."""
