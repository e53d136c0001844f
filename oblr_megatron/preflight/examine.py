"""A dry run: check the run, build its models, count its memory.

    result = examine(config, world_size=1024, per_node=8, device=RankDevice(on_gpu=True, num_bytes=80 * 10**9, ...))
    result.models.total, result.peak

The machines may be elsewhere. The checks are those of checklist.py; the run checks the rest when it starts.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oblr_megatron.checkpoint.hf_dir import check_hf_dir, check_hf_files
from oblr_megatron.checks.run_dir import check_run_dir
from oblr_megatron.config import Config
from oblr_megatron.config.data import SourceConfig
from oblr_megatron.data.sources import kind_of
from oblr_megatron.errors import UserError
from oblr_megatron.memory.engine import check_cache
from oblr_megatron.memory.pass_plan import Layout, idle_replicas
from oblr_megatron.memory.peak import UPDATE
from oblr_megatron.memory.rank_shapes import RankSizes
from oblr_megatron.memory.select_mode import resolve, with_mode
from oblr_megatron.model.published import published
from oblr_megatron.observe.performance.flops import total_parameters
from oblr_megatron.preflight.checklist import Proposed, check
from oblr_megatron.preflight.device_memory import RankDevice, RankMemory, rank_memory
from oblr_megatron.preflight.inputs import check_dealing, find_saved, open_inputs
from oblr_megatron.preflight.models import Models, build_models
from oblr_megatron.rewards.http import is_url
from oblr_megatron.rollout.replay import check_replay


@dataclass(frozen=True, slots=True)
class DryRun:
    """Result of a dry run.

    Example: DryRun(Config(...), {...}, 8, RankDevice(...), "models/Q: complete", None, Models(...), (RankMemory(...),))
    """

    config: Config  # with its norm mode chosen
    hf_config: Mapping[str, Any]
    world_size: int
    device: RankDevice  # of each rank
    model: str  # a line that names the source of the model's configuration
    idle: str | None  # a warning if replicas wait for one another
    models: Models
    memory: tuple[RankMemory, ...]  # one rank of each pipeline stage

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(one.peak for one in self.memory)


def examine(config: Config, world_size: int, per_node: int, device: RankDevice) -> DryRun:
    """Check a run, build the model of every rank and count its memory.

    Raises:
        UserError: the first problem. `check_fits` checks the memory.
    """
    hf_config, line = model_of(config.model.path)
    decided = check_run(hf_config, config, world_size, per_node, device)
    memory = tuple(rank_memory(hf_config, decided, world_size, device))
    models = build_models(hf_config, decided, world_size)
    _check_counts(hf_config, decided, models)
    idle = None if config.rollout.only else idle_replicas(decided, Layout.of(hf_config, decided, world_size))
    return DryRun(decided, hf_config, world_size, device, line, idle, models, memory)


def _check_counts(hf_config: Mapping[str, Any], config: Config, models: Models) -> None:
    """The parameters of the built models match the memory model and the size of the whole model."""
    expected = total_parameters(hf_config)
    assert models.total == expected, f"{models.total} parameters on all ranks, but {expected} in the model"
    for held in models.holdings:
        sizes = RankSizes.of(hf_config, config, held.position.pp)
        counted = (sizes.dense_parameters, sizes.expert_parameters, sizes.adapter_parameters)
        built = (held.dense, held.experts, held.adapters)
        assert built == counted, f"rank {held.ranks[0]} holds {built} parameters, but the memory model has {counted}"


def model_of(path: Path) -> tuple[dict[str, Any], str]:
    """(config.json, a line that names its source): from the model directory, or as published under its name.

    Raises:
        UserError: the directory holds no complete model, or it is absent and no published model has its name.
    """
    if not path.exists():
        name = path.name.removesuffix("-Base")
        return published(name), f"{path} does not exist: using the configuration published as {name}"
    if list(path.glob("*.safetensors")):
        return check_hf_dir(path).config, f"{path}: complete"
    return check_hf_files(path), f"{path} has no weights: only its config.json and tokenizer were checked"


def check_run(
    hf_config: Mapping[str, Any], config: Config, world_size: int, per_node: int, device: RankDevice
) -> Config:
    """Check a run; returns it with its norm mode chosen.

    Raises:
        UserError: the first problem.
    """
    check(Proposed(config, hf_config, world_size, per_node, device.on_gpu), "layout", "device")
    if config.rollout.only:  # nothing is trained
        return config
    choice = resolve(
        hf_config,
        config,
        world_size,
        free_bytes=device.num_bytes,
        on_gpu=device.on_gpu,
        transformer_engine=device.transformer_engine,
    )
    decided = with_mode(config, choice.mode)
    check_dealing(hf_config, decided, world_size)
    return decided


def check_fits(memory: Sequence[RankMemory], config: Config, device: RankDevice) -> None:
    """Refuse a rank that needs more memory than its device has, and an engine with a KV cache below one sequence.

    Raises:
        UserError: names the stage, the phase and both sizes.
    """
    if memory[0].engine is not None:
        check_cache(memory[0].engine, config)
    fullest = max(memory, key=lambda one: one.peak)
    if device.num_bytes is None or fullest.peak <= device.num_bytes:
        return
    sampling = fullest.rollout >= fullest.training  # equal on a CPU with rollout.only
    phase = "during sampling" if sampling else f"at the {fullest.step.moment}"
    awake = fullest.engine.kv_cache if fullest.engine is not None else 0
    if not device.on_gpu and (sampling or awake > fullest.step.total):
        fix = "lower rollout.kv_cache_gib or num_engines"
    elif sampling:
        fix = "lower rollout.gpu_memory_utilization, or start more ranks with parallel.use_distributed_optimizer"
    elif fullest.step.moment == UPDATE:
        fix = "set parallel.use_distributed_optimizer with several replicas, or raise a parallel size"
    else:
        fix = 'set parallel.recompute_granularity to "full", lower micro_batch_tokens, or raise a parallel size'
        if fullest.step.fold_sums > fullest.step.main_grad:  # rollout.overlap = "stream" keeps those of all folds
            fix = f"lower algo.snr.num_folds to the number of replicas, {fix}"
    raise UserError(
        f"a rank of pipeline stage {fullest.step.stage} needs {_gb(fullest.peak)} {phase}, but its device has "
        f"{_gb(device.num_bytes)}",
        where="config: parallel, rollout",
        fix=fix,
    )


def _gb(num_bytes: int) -> str:
    """Decimal gigabytes, as devices are sold. Example: _gb(75 * 10**9) is "75.0 GB"."""
    return f"{num_bytes / 1e9:.1f} GB"


def check_files(config: Config, hf_config: Mapping[str, Any]) -> list[str]:
    """Check those files of a run on other machines that are on this one, as the run would.

    Returns:
        What was not checked, with the reason; at least the machines themselves.

    Raises:
        UserError: the first problem.
    """
    path, rollout = config.model.path, config.rollout
    lines = ["GPUs, packages and free space of the machines that will run it"]
    model = check_hf_dir(path) if list(path.glob("*.safetensors")) else None
    if model is None:
        state = "has no weights" if path.exists() else "is not on this machine"
        lines.append(f"the model's weights and tokenizer: {path} {state}")
    if os.path.isdir(config.run_dir.parent):  # also False if this user may not look
        check_run_dir(config.run_dir, holds_run=config.checkpoint.resume != "none")
    else:
        lines.append(f"run_dir: {config.run_dir.parent} is not on this machine")
    if rollout.servers:
        lines.append(f"the servers {', '.join(rollout.servers)}: a dry run for other machines contacts none")
    if rollout.replay is not None and rollout.replay.is_dir():
        check_replay(config, int(hf_config["vocab_size"]), "" if model is None else model.fingerprint)
    elif rollout.replay is not None:
        lines.append(f"the saved samples: {rollout.replay} is not on this machine")
    services = ", ".join(name for name in config.reward.names if is_url(name))
    if services and rollout.replay is None:
        lines.append(f"the reward services {services}: a dry run for other machines contacts none")
    read = (*config.data.train, *config.data.exclude, *config.evaluate.data.values())
    sources = read if rollout.replay is None else ()
    absent = list(dict.fromkeys(source.path for source in sources if not _is_here(source)))
    lines += [f"rows of {name}: not on this machine, or a data set of the hub" for name in absent]
    if model is not None and not absent:
        inputs = open_inputs(config, model, None, find_saved(config, model))
        for line in inputs.warnings(config):
            print(line)
    elif sources:
        rest = [source.path for source in sources if source.path not in absent]
        lines += [f"rows of {name}: they are read together with the model and all other data" for name in rest]
    return lines


def _is_here(source: SourceConfig) -> bool:
    """Whether a source is local; data sets on the hub are not.

    Raises:
        UserError: rows cannot be generated as asked, here or on another machine.
    """
    try:
        return kind_of(source) != "hub"
    except UserError:
        if source.gym_task:
            raise
        return False
