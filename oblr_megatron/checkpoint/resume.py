"""Which checkpoint a run goes on from, and whether it can.

    checkpoints = find(config, model)                 # before any process: manifests and sizes
    resumed = choose(checkpoints, parallel)           # on all ranks: every byte, a share of the files each

A damaged checkpoint is named and passed over for an older one; where none is left, the run does not start.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from oblr_megatron.checkpoint import store
from oblr_megatron.checkpoint.store import CheckpointError, Manifest
from oblr_megatron.errors import UserError
from oblr_megatron.formatting import flatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oblr_megatron.checkpoint.hf_dir import HFDir
    from oblr_megatron.config import Config

logger = logging.getLogger(__name__)

NEWEST = "newest"
CARRIED = ("seed", "model.dtype", "optimizer.name", "algo.schedule", "algo.snr.estimator")
"""Settings under others of which the saved state means nothing."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One whose manifest is whole. Example: Checkpoint(Path("run/checkpoints/step_00000040"), manifest)"""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Steps done."""
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """The trainer's facts, see `run.py`."""
        return self.manifest.state


def find(config: Config, model: HFDir) -> list[Checkpoint]:
    """Those the run may go on from, the best choice first; empty: it begins at the beginning.

    Raises:
        UserError: all there are, or the one that was asked for, are damaged; or belong to another run.
    """
    resume = config.checkpoint.resume
    if resume == "none":
        return []
    paths = store.checkpoints_of(config.run_dir)
    if not paths and resume != NEWEST:
        paths = [Path(resume)]
    found, problems = [], []
    for path in paths:
        try:
            found.append(Checkpoint(path, store.read_manifest(path)))
        except CheckpointError as error:
            problems.append(error)
    if problems and not found:
        raise problems[0]
    for problem in problems:
        logger.warning("%s: passed over", problem)
    for checkpoint in found[:1]:
        check_fits(checkpoint, config, model)
    return found


def check_fits(checkpoint: Checkpoint, config: Config, model: HFDir) -> None:
    """Refuse a checkpoint whose state cannot be carried on by this configuration and model.

    Raises:
        UserError: naming what differs.
    """
    from oblr_megatron.weights.names import ModelShape

    before = checkpoint.state.get("config")
    if before is None:
        raise CheckpointError(
            "the checkpoint holds weights alone, and no run to go on with",
            where=str(checkpoint.path),
            fix="to start from its weights: oblr-megatron convert to-hf, and set model.path",
        )
    for name in CARRIED:
        old, new = flatten(before).get(name), flatten(config.model_dump(mode="json"))[name]
        if old is not None and old != new:  # a checkpoint of an earlier version may not know the setting
            raise UserError(
                f"the checkpoint was made with {name} {old!r}, the run is set to {new!r}",
                where=str(checkpoint.path),
                fix=f"set {name} to {old!r}, or start a new run",
            )
    saved = json.loads((checkpoint.path / "hf" / "config.json").read_text(encoding="utf-8"))
    if ModelShape.of(saved) != ModelShape.of(model.config):
        raise UserError(
            f"the checkpoint is of another model than {model.path}: {ModelShape.of(saved)}",
            where=str(checkpoint.path),
            fix="set model.path to the model the run was started from",
        )


def changes(checkpoint: Checkpoint, config: Config) -> list[str]:
    """What the run is set to do otherwise from here on. Example: ["optimizer.lr 1e-06 -> 2e-06"]"""
    before, now = flatten(checkpoint.state["config"]), flatten(config.model_dump(mode="json"))
    aside = ("run_dir", "checkpoint.", "log.")
    return [
        f"{name} {before[name]} -> {now[name]}"
        for name in now
        if name in before and before[name] != now[name] and not name.startswith(aside)
    ]


def choose(checkpoints: Sequence[Checkpoint], rank: int, world_size: int) -> Checkpoint | None:
    """The first whose files are all what their manifest says; collective, each rank reads a share of them.

    Args:
        checkpoints: what `find` gave on the first rank; those of other ranks are not looked at.
        rank: of this process.
        world_size: how many there are.

    Raises:
        CheckpointError: none is, though there are some.
    """
    shared = [list(checkpoints)]
    dist.broadcast_object_list(shared, src=0)
    problem: CheckpointError | None = None
    for checkpoint in shared[0]:
        problem = _problem(checkpoint, rank, world_size)
        if problem is None:
            return checkpoint
        if rank == 0:
            logger.warning("%s: passed over", problem)
    if problem is not None:
        raise problem
    return None


def _problem(checkpoint: Checkpoint, rank: int, world_size: int) -> CheckpointError | None:
    """What is wrong with it, the same on every rank; large files are dealt out evenly, by size."""
    files = checkpoint.manifest.files
    by_size = sorted(files, key=lambda name: (-files[name].num_bytes, name))
    own: dict[str, str] | None = None
    try:
        store.check_contents(checkpoint.path, checkpoint.manifest, by_size[rank::world_size])
    except CheckpointError as error:
        own = {"what": error.what, "where": error.where, "mend": error.fix}
    problems: list[dict[str, str] | None] = [None] * world_size
    dist.all_gather_object(problems, own)
    first = next((problem for problem in problems if problem is not None), None)
    return None if first is None else CheckpointError(first["what"], where=first["where"], fix=first["mend"])
