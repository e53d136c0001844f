"""Section [checkpoint]: what a run saves and where it resumes. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from oblr_megatron.config.section import LONGEST_WAIT_S, Section, written_out


class CheckpointConfig(Section):
    """Checkpoints of a run, where it resumes, and when it stops early."""

    every_steps: int = Field(50, ge=0)
    """Save RUN_DIR/checkpoints/step_N every this many steps and after the last one. 0: only on an early stop,
    and for a new best_metric."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints to keep, besides the best one. The next one is written before the oldest is deleted."""
    best_metric: str = ""
    """Evaluation metric, e.g. "eval/gsm8k/accuracy". Each new maximum is saved at once and kept, and exported as
    RUN_DIR/hf_best at the end. Empty: no best checkpoint."""
    async_save: bool = True
    """Copy the state to host memory and write it in a thread while training goes on. false: wait for the files."""
    resume: Annotated[str, AfterValidator(written_out)] = "none"
    """"none"; "newest" (`--resume`): the newest complete checkpoint of run_dir, or a fresh start without one. A
    directory is the checkpoint where a new run begins; later attempts, also with `--resume`, continue from the run's
    own."""
    time_limit_s: float | None = Field(None, gt=0)
    """Seconds from the start of the process (or its launcher) until the job is killed. By default SLURM's limit."""
    exit_before_timeout_s: float = Field(0.0, ge=0, le=LONGEST_WAIT_S)
    """Save and stop when this many seconds of the time limit are left, or earlier if the next step may not fit.
    0: never."""
    export_hf: bool = True
    """Write the final weights to RUN_DIR/hf as a Hugging Face directory."""
