"""What a run saves, and what it goes on from. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from oblr_megatron.config.section import Section


class CheckpointConfig(Section):
    """What a run saves, and what it goes on from."""

    every_steps: int = Field(50, ge=0)
    """Save RUN_DIR/checkpoints/step_N every so many steps and after the last; 0: only when the run is stopped early."""
    keep_last: int = Field(2, ge=1)
    """Keep this many newest checkpoints, beside the best one; one more is written before the oldest goes."""
    best_metric: str = ""
    """Keep the checkpoint in which this figure of an evaluation is largest, e.g. "eval/gsm8k/accuracy", and export it
    as RUN_DIR/hf_best at the end; every new best is saved, due or not. Empty: none is the best."""
    async_save: bool = True
    """Copy the state to host memory and write it in a thread while the run goes on; false waits for the files."""
    save_timeout_s: float = Field(1800.0, gt=0)
    """Deadline for a checkpoint to be written, seconds; past it the run ends."""
    resume: str = "none"
    """"none"; "newest", the newest whole checkpoint of run_dir, or the beginning where there is none (`--resume`); or
    the directory of a checkpoint."""
    time_limit_s: float | None = Field(None, gt=0)
    """Seconds from the start of the process, or of its launcher, until the job is ended from outside; by default what
    SLURM says."""
    exit_before_timeout_s: float = Field(0.0, ge=0)
    """Save and stop while this much of the time limit is left, seconds, or sooner if a step might not fit; 0: never."""
    export_hf: bool = True
    """Write RUN_DIR/hf, a Hugging Face directory of the last weights, at the end."""
