"""Where a run with `rollout.only` continues: after its last saved step.

    checkpoints = find(config, model)          # as checkpoint/resume.py does for runs that train; [] starts at step 1

Each file of RUN_DIR/rollouts has the position in the data after its step. Seeds of sampling depend on the step alone.
So a resumed run draws what the unbroken run would have drawn.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oblr_megatron.checkpoint.hf_dir import HFDir
from oblr_megatron.checkpoint.resume import NEWEST, Checkpoint
from oblr_megatron.checkpoint.store import Manifest
from oblr_megatron.checks.run_dir import CONFIG_FILE, ROLLOUTS
from oblr_megatron.config import Config
from oblr_megatron.errors import Problem, UserError
from oblr_megatron.formatting import flatten
from oblr_megatron.metrics import logged_until
from oblr_megatron.rollout.replay import other_filters, other_settings
from oblr_megatron.rollout.step_file import SavedStep, read_step, step_path

logger = logging.getLogger(__name__)

NEW_RUN = "name a new run_dir"


def find(config: Config, model: HFDir) -> list[Checkpoint]:
    """The last saved step as a checkpoint without files; [] if the run has done no step.

    A step counts when metrics.jsonl has it, too. Damaged files after the last readable one are logged, and their steps
    are sampled again.

    Raises:
        UserError: The run directory is of a run that trains. Or no saved step can be read. Or the samples are of
            another model or have other sizes.
    """
    run_dir, resume = config.run_dir, config.checkpoint.resume
    if resume == "none":
        return []
    if resume != NEWEST:
        what = "a run with rollout.only has no checkpoints, so it cannot begin from one"
        fix = "convert it with oblr-megatron convert to-hf, and set model.path to the result"
        raise UserError(what, where=f"config: checkpoint.resume {resume}", fix=fix)
    before = _config_of(run_dir)
    steps = [record["step"] or 0 for record in logged_until(run_dir)]
    if before is not None and steps and not before["rollout"]["only"]:
        raise UserError("run_dir holds a run that trains", where=str(run_dir), fix=NEW_RUN)
    done, problem = int(max(steps, default=0)), None
    for step in range(done, 0, -1):
        path = step_path(run_dir / ROLLOUTS, step)
        try:
            saved = read_step(path)
        except UserError as error:
            problem = problem or error
            logger.warning("step %d is sampled again: %s", step, error)
            continue
        for what, fix in _problems(saved, config, model, before):
            raise UserError(what, where=str(path), fix=fix)
        return [Checkpoint(path, Manifest(step, {}, {"config": before, "data": saved.position}))]
    if problem is not None:
        raise problem
    return []


def _config_of(run_dir: Path) -> dict[str, Any] | None:
    """The configuration of the run so far; None before its first start."""
    path = run_dir / CONFIG_FILE
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return config if isinstance(config["rollout"]["only"], bool) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"the run's configuration cannot be read: {error}", where=str(path), fix=NEW_RUN) from None


def _problems(saved: SavedStep, config: Config, model: HFDir, before: dict[str, Any] | None) -> Iterator[Problem]:
    """Why further steps would not belong to the same set of samples."""
    shuffle = config.data.shuffle
    if flatten(before or {}).get("data.shuffle", shuffle) != shuffle:
        began, now = ("false", "true") if shuffle else ("true", "false")
        fix = f"set data.shuffle to {began}, or {NEW_RUN}"
        yield f"the run began with data.shuffle {began}, but the config has {now}", fix
    if saved.model != model.fingerprint:
        fix = "set model.path to the model that the run started with"
        yield "the samples were drawn from another model", f"{fix}, or {NEW_RUN}"
    for what, fix in (*other_settings(saved, config), *other_filters(saved, config)):
        yield what, f"{fix}, or {NEW_RUN}"
