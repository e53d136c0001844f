"""Finds the checkpoint from which a run resumes, and checks that it fits.

    checkpoints = find(config, model)                     # before the ranks start: manifests, sizes, the model's config
    resumed = choose(checkpoints, rank, world_size)       # collective: checksums, a share of the files per rank

A damaged checkpoint is logged and an older one is used. If none is intact, the run does not start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from oblr_megatron.checkpoint import store
from oblr_megatron.checkpoint.hf_description import forward_traits, hf_config_in
from oblr_megatron.checkpoint.hf_dir import HFDir
from oblr_megatron.checkpoint.store import CheckpointError, Manifest, UnreadError
from oblr_megatron.checks.run_dir import EXPORTS, filled
from oblr_megatron.config import Config
from oblr_megatron.errors import UserError
from oblr_megatron.formatting import flatten
from oblr_megatron.metrics import METRICS_FILE, logged_until
from oblr_megatron.weights.names import ModelShape

logger = logging.getLogger(__name__)

NEWEST = "newest"
HF_CONFIG = "hf/config.json"  # in a checkpoint
CARRIED = (
    *("seed", "data.shuffle", "model.dtype", "optimizer.name"),
    *("algo.aggregation", "algo.schedule", "algo.snr.estimator", "algo.snr.reference"),
    *("model.lora.rank", "model.lora.alpha", "model.lora.targets"),
)
"""Settings that must equal those of the checkpoint, because its state depends on them."""
OPEN_TABLES = ("rollout.vllm.", "evaluate.data.", "data.chat_template_options.")
"""Tables with keys of the user's own choice."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint with an intact manifest. Example: Checkpoint(Path("run/checkpoints/step_00000040"), manifest)"""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Steps done."""
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """The trainer's facts, see run.py."""
        return self.manifest.state


def find(config: Config, model: HFDir) -> list[Checkpoint]:
    """Checkpoints to resume from, first choice first; [] to start from step 0.

    Raises:
        UserError: No checkpoint is usable. Or one cannot be read now. Or the newest belongs to another run. Or the run
            has done steps but has no checkpoint. Or metrics.jsonl is damaged. Or the run would replace its reference
            model.
    """
    resume = config.checkpoint.resume
    if resume == "none":
        return []
    check_reference(config)
    paths = store.checkpoints_of(config.run_dir)
    if resume != NEWEST and Path(resume).resolve() in {path.resolve() for path in paths[1:]}:
        what = "%s continues after its newest checkpoint, %s, not after checkpoint.resume = %s: a requeued job does so"
        logger.warning(what + "; name a new run_dir to go back", config.run_dir, paths[0].name, resume)
    if not paths:
        check_no_progress(config.run_dir, resume)
        paths = [] if resume == NEWEST else [Path(resume)]
    usable, problems = [], []
    for path in paths:
        try:
            manifest = store.read_manifest(path)
            store.check_contents(path, manifest, [HF_CONFIG])  # `check_fits` reads it
            usable.append(Checkpoint(path, manifest))
        except CheckpointError as error:
            if isinstance(error, UnreadError) and not usable:
                raise  # an older one would lose steps, and start a second history of the run
            problems.append(error)
    if problems and not usable:
        raise problems[0]
    logged_until(config.run_dir)  # raises before anything starts
    for problem in problems:
        kind = "an unreadable" if isinstance(problem, UnreadError) else "a damaged"
        logger.warning("skipped %s checkpoint: %s", kind, problem)
    for checkpoint in usable[:1]:
        check_fits(checkpoint, config, model)
    return usable


def check_no_progress(run_dir: Path, resume: str = NEWEST) -> None:
    """Refuse to start a run again from its beginning, step 0 or the checkpoint `resume`, over its own results.

    Raises:
        UserError: the run has done steps, or its metrics are damaged.
    """
    steps = max((record["step"] or 0 for record in logged_until(run_dir)), default=0)
    results = [name for name in EXPORTS if filled(run_dir / name)]
    if not steps and not results:
        return
    done = f"come to step {steps}" if steps else f"written {' and '.join(results)}"
    fix = f"name a new run_dir to begin at {'step 0' if resume == NEWEST else resume}, "
    if results:
        fix += f"with model.path={run_dir / results[0]} to go on from these weights"
    else:
        fix += f"or give these steps up: rm {run_dir / METRICS_FILE}"
    what = f"the run has {done}, but it has no whole checkpoint to resume from"
    raise UserError(what, where=str(run_dir), fix=fix)


def check_reference(config: Config) -> None:
    """Refuse a reference or base model that the run replaces by its own weights: a later resume would have another.

    Raises:
        UserError: model.path is an export of this run, and the run has a KL penalty or adapters.
    """
    path = config.model.path
    exports = [(config.run_dir / name).resolve() for name in EXPORTS]
    uses = ["algo.kl_coefficient takes model.path as its reference"] if config.algo.kl_coefficient else []
    uses += ["model.lora adapts the model in model.path"] if config.model.lora.rank else []
    if uses and config.checkpoint.export_hf and path.resolve() in exports:
        raise UserError(
            f"{uses[0]}, but this run replaces that directory at its end",
            where=f"config: model.path {path}",
            fix="set model.path to the model that the run started from, or to a copy of this directory",
        )


def check_fits(checkpoint: Checkpoint, config: Config, model: HFDir) -> None:
    """Check that the run can continue with this checkpoint under this config and model.

    Raises:
        UserError: names the setting or model that differs.
    """
    where, before, now = str(checkpoint.path), checkpoint.state.get("config"), config.model_dump(mode="json")
    if before is None:
        fix = "convert it with oblr-megatron convert to-hf and set model.path to the result"
        raise CheckpointError("the checkpoint holds only weights, not the state of a run", where=where, fix=fix)
    carried, wanted = flatten(before), flatten(now)
    for name in CARRIED:
        if name not in carried:
            fix = "convert it with oblr-megatron convert to-hf, and start a new run from the result"
            raise CheckpointError(f"the checkpoint is of a version without {name}", where=where, fix=fix)
        old, new = carried[name], wanted[name]
        if old != new:
            told = [json.dumps(value) if isinstance(value, bool) else repr(value) for value in (old, new)]
            what = f"the checkpoint was made with {name} {told[0]}, but the config has {told[1]}"
            raise UserError(what, where=where, fix=f"set {name} to {told[0]}, or start a new run")
    momentum = config.optimizer.sgd_momentum
    if config.optimizer.name == "sgd" and momentum > 0 and before["optimizer"]["sgd_momentum"] == 0:
        what = f"the checkpoint was made without momentum, but optimizer.sgd_momentum is {momentum:g}"
        raise UserError(what, where=where, fix="set optimizer.sgd_momentum to 0, or start a new run")
    old, new = _token_scale(before), _token_scale(now)
    if old != new:
        what = f"the checkpoint's gradients are divided by {old:g} tokens, but the config divides by {new:g}"
        what += "; moments and averages are in the old unit"
        raise UserError(what, where=where, fix=f"set algo.token_scale to {old:g}")
    base = checkpoint.state.get("base")
    if base is not None and uses_base(config) and base != model.fingerprint:
        whose = "adapters belong to another model" if config.model.lora.rank else "KL penalty has another reference"
        what = f"the checkpoint's {whose} than {model.path}: the weights differ"
        raise UserError(what, where=where, fix=f"set model.path to {before['model']['path']}, as the run had it")
    _check_model(checkpoint.path / HF_CONFIG, model, where)


def uses_base(config: Config) -> bool:
    """Whether the run computes with the weights of model.path besides those that it trains."""
    return config.model.lora.rank > 0 or config.algo.kl_coefficient > 0


def _check_model(saved: Path, model: HFDir, where: str) -> None:
    """Refuse the model if its forward pass differs from the checkpoint's. `saved` is the checkpoint's config.json."""
    shape = ModelShape.of(json.loads(saved.read_text(encoding="utf-8")))
    old, new = forward_traits(hf_config_in(saved.parent)), forward_traits(model.hf_config())
    differs = f"{shape}" if shape != ModelShape.of(model.config) else ""
    differs = differs or ", ".join(
        f"{name} {old.get(name)}, not {new.get(name)}" for name in old | new if old.get(name) != new.get(name)
    )
    if differs:
        what = f"the checkpoint's model differs from {model.path}: {differs}"
        raise UserError(what, where=where, fix="set model.path to the model that the run started from")


def _token_scale(settings: dict[str, Any]) -> float:
    """The divisor of a saved configuration's constant aggregation; 1 for others."""
    algo = settings["algo"]
    if algo["aggregation"] != "constant":
        return 1.0
    return float(algo["token_scale"] or settings["rollout"]["max_response_tokens"])


def changes(checkpoint: Checkpoint, config: Config) -> list[str]:
    """Settings that changed since the checkpoint. Example: ["optimizer.lr 1e-06 -> 2e-06"]"""
    before, now = flatten(checkpoint.state["config"]), flatten(config.model_dump(mode="json"))
    aside = ("run_dir", "checkpoint.", "log.")
    return [
        f"{name} {before.get(name, 'not set')} -> {now.get(name, 'not set')}"
        for name in now | before
        # Elsewhere, a key that only one of them has is one that only one version of this package knows.
        if (name.startswith(OPEN_TABLES) or (name in before and name in now))
        and before.get(name) != now.get(name)
        and not name.startswith(aside)
    ]


def choose(checkpoints: Sequence[Checkpoint], rank: int, world_size: int) -> Checkpoint | None:
    """The first of rank 0's checkpoints with correct checksums; collective, each rank reads a share of the files.

    Raises:
        CheckpointError: every checkpoint is damaged, or one cannot be read now.
    """
    shared = [list(checkpoints)]
    dist.broadcast_object_list(shared, src=0)
    problem: CheckpointError | None = None
    for checkpoint in shared[0]:
        problem = damage_of(checkpoint, rank, world_size)
        if problem is None:
            return checkpoint
        if isinstance(problem, UnreadError):
            raise problem
        if rank == 0:
            logger.warning("skipped a damaged checkpoint: %s", problem)
    if problem is not None:
        raise problem
    return None


def damage_of(checkpoint: Checkpoint, rank: int, world_size: int) -> CheckpointError | None:
    """The first wrong checksum, equal on every rank; collective. Files are distributed over ranks evenly by size."""
    files = checkpoint.manifest.files
    by_size = sorted(files, key=lambda name: (-files[name].num_bytes, name))
    own: CheckpointError | None = None
    try:
        store.check_contents(checkpoint.path, checkpoint.manifest, by_size[rank::world_size])
    except CheckpointError as error:
        own = error
    problems: list[CheckpointError | None] = [None] * world_size
    dist.all_gather_object(problems, own)
    return next((problem for problem in problems if problem is not None), None)
