"""All checks of a run before any process starts: model, layout, machine, data, reward, run directory.

The launcher calls `preflight` before torchrun, and every rank calls it again before it joins the process group. Each
problem is a `UserError`: one line, exit status 2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.algo.user_baseline import check_baseline
from oblr_megatron.checkpoint import resume
from oblr_megatron.checkpoint.hf_dir import HFDir, check_hf_dir
from oblr_megatron.checkpoint.partials import disk_bytes
from oblr_megatron.checkpoint.resume import Checkpoint
from oblr_megatron.checkpoint.store import NoSpaceError, check_replaceable, check_space, checkpoint_bytes
from oblr_megatron.checks.layout import check_layout, heads_problem
from oblr_megatron.checks.lengths import check_positions
from oblr_megatron.checks.machine import (
    check_compiler,
    check_head_size,
    check_machine,
    check_pushable,
    transformer_engine_chosen,
)
from oblr_megatron.checks.run_dir import CHECKPOINTS, CONFIG_FILE
from oblr_megatron.checks.vllm_options import check_processor, check_routes, check_speculation, check_vllm_options
from oblr_megatron.data.packing import check_folds
from oblr_megatron.data.prompt_set import prompts_digest
from oblr_megatron.data.prompts import PromptStream
from oblr_megatron.environments.registry import check_environment, data_for
from oblr_megatron.errors import UserError
from oblr_megatron.evaluation.setup import load_sets
from oblr_megatron.extension import extension
from oblr_megatron.memory.pass_plan import Layout, num_folds
from oblr_megatron.memory.select_mode import ModeChoice, free_memory, resolve, with_mode
from oblr_megatron.model.parallel import local_rank, local_world_size
from oblr_megatron.model.precision import this_machine
from oblr_megatron.observe.performance.profiler import check_profile
from oblr_megatron.observe.trackers.registry import check_trackers
from oblr_megatron.rewards.registry import check_reward, check_rows
from oblr_megatron.rollout import resume_sampling
from oblr_megatron.rollout.placement import place
from oblr_megatron.rollout.replay import check_replay, check_replayed
from oblr_megatron.rollout.server_checks import check_servers
from oblr_megatron.runtime.stopping import check_time_left

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oblr_megatron.config import Config
    from oblr_megatron.types import Prompt


@dataclass(frozen=True, slots=True)
class Inputs:
    """The checked and opened inputs of a run."""

    model: HFDir
    norms: ModeChoice | None  # the norm mode and its memory; None if nothing is trained
    stream: PromptStream | None  # training prompts; None in a replay
    held_out: dict[str, list[Prompt]]  # evaluation sets by name
    checkpoints: list[Checkpoint]  # to resume from, the best choice first; empty: a fresh start

    def rows(self) -> dict[str, str]:
        """A digest of the rows of each set, by the key of its source."""
        digests = {f"evaluate.data.{name}": prompts_digest(prompts) for name, prompts in self.held_out.items()}
        return digests if self.stream is None else digests | {"data.train": self.stream.state_dict()["fingerprint"]}


def preflight(config: Config, world_size: int, *, owns_run_dir: bool = True) -> Inputs:
    """Check a run and open its inputs.

    One rank `owns_run_dir`: it also checks what only this rank uses, such as the servers. The caller has checked the
    run directory itself (`check_run_dir`), because the lock in it is taken before.

    Raises:
        UserError: the first problem.
    """
    check_time_left(config.checkpoint)
    check_trackers(config.log.trackers)
    model = check_hf_dir(config.model.path)
    model.hf_config()  # raises if transformers cannot read it
    check_layout(model.config, config, world_size)
    check_machine(config, model.config, this_machine())
    if torch.cuda.is_available():
        check_compiler()
    checkpoints: list[Checkpoint] = []
    if owns_run_dir:
        checkpoints = find_saved(config, model)
    norms = None if config.rollout.only else choose_mode(model, config, checkpoints, world_size)
    check_settings(model.config, config, world_size, local_world_size(world_size), on_gpu=torch.cuda.is_available())
    if owns_run_dir and config.rollout.replay is None and config.rollout.servers:
        check_servers(config)  # only this rank talks to them
    if config.rollout.own_engines:
        check_speculation(config.rollout.speculation, "config: rollout.speculation")
        check_processor(config.rollout.vllm, on_gpu=torch.cuda.is_available())
    if owns_run_dir:
        check_replay(config, int(model.config["vocab_size"]), model.fingerprint)
        check_room(config, model)
        check_exports(config)
        _ = model.copied  # reads what every save writes: the directory may disappear while the run trains
    return open_inputs(config, model, norms, checkpoints)


def check_same_rows(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks that read other rows than the first one, from `Inputs.rows` of all ranks.

    A file on a node's own disk may be of another version.

    Raises:
        UserError: names the first such rank.
    """
    for rank, rows in enumerate(by_rank):
        for key, digest in rows.items():
            if digest != by_rank[0].get(key):
                raise UserError(
                    f"rank {rank} reads other rows than rank 0",
                    where=f"config: {key}",
                    fix="copy the same files to all nodes, or read them from a shared file system",
                )


def check_settings(
    hf_config: Mapping[str, Any], config: Config, world_size: int, per_node: int, *, on_gpu: bool
) -> None:
    """The checks that need neither weights nor data nor the machines of the ranks; dry runs and the planner use them.

    Raises:
        UserError: the first problem.
    """
    if not config.rollout.only:
        check_baseline(config.algo.baseline, config.num_prompts, config.group_size)
    if config.rollout.replay is None:
        rollout = config.rollout
        check_rows(config.reward, (*config.data.train, *config.evaluate.data.values()))
        check_vllm_options(rollout.vllm, on_gpu=on_gpu)
        if config.model.moe_routing_replay:
            check_routes(hf_config, rollout.vllm, rollout.speculation, on_gpu=on_gpu, where="config: rollout")
    if config.rollout.own_engines:
        check_head_size(hf_config, config.model.path, on_gpu=on_gpu)
        place(config, world_size, per_node, on_gpu=on_gpu)
        size = config.rollout.tensor_parallel_size  # vLLM divides the heads among an engine's devices
        if problem := heads_problem(hf_config, size, "rollout.tensor_parallel_size"):
            raise UserError(problem[0], where="config: rollout", fix=problem[1])
    check_pushable(hf_config, config, on_gpu=on_gpu)
    if config.model.batch_invariant:
        extension("model.batch_invariant")(hf_config, config, on_gpu=on_gpu)
    check_profile(config.log, on_gpu=on_gpu)
    check_reward(config.reward, max_response_tokens=config.rollout.max_response_tokens)
    check_environment(config)
    check_positions(config, hf_config)


def choose_mode(model: HFDir, config: Config, checkpoints: Sequence[Checkpoint], world_size: int) -> ModeChoice:
    """The norm mode of a run. A resumed run keeps its mode if other settings still allow it.

    Raises:
        UserError: see `select_mode` and `check_dealing`.
    """
    kept = with_saved_mode(config, checkpoints)
    try:
        norms = select_mode(model, kept, world_size)
        check_dealing(model.config, with_mode(kept, norms.mode), world_size)
    except UserError:
        if kept is config:
            raise
        return choose_mode(model, config, (), world_size)  # the user asks for "auto", so another mode is no error
    return norms


def check_dealing(hf_config: Mapping[str, Any], config: Config, world_size: int) -> None:
    """Refuse folds that do not divide among the ranks, for a config with its norm mode chosen.

    Raises:
        UserError: names both numbers.
    """
    layout = Layout.of(hf_config, config, world_size)
    if config.algo.snr.needs_folds:
        check_folds(num_folds(config.per_update), layout.replicas // layout.block)


def select_mode(model: HFDir, config: Config, world_size: int) -> ModeChoice:
    """Choose the norm mode by memory: all of this rank's GPU, or its share of free host memory. One rank decides.

    Raises:
        UserError: the mode is impossible in this layout or does not fit.
    """
    if on_gpu := torch.cuda.is_available():  # the next call creates no CUDA context, so the launcher may make it, too
        free_bytes: int | None = int(torch.cuda.get_device_properties(local_rank()).total_memory)
    else:
        free_bytes = free_memory(local_world_size(world_size))
    return resolve(
        model.config,
        config,
        world_size,
        free_bytes=free_bytes,
        on_gpu=on_gpu,
        transformer_engine=transformer_engine_chosen(config.model, this_machine()),
    )


def with_saved_mode(config: Config, checkpoints: Sequence[Checkpoint]) -> Config:
    """Keep the mode that "auto" chose before, in the same layout: modes differ in the last bits of a gradient."""
    if config.gradnorm.mode != "auto" or not checkpoints:
        return config
    before = checkpoints[0].state["config"]
    same = before["parallel"] == config.parallel.model_dump(mode="json")
    return with_mode(config, before["gradnorm"]["mode"]) if same else config


def find_saved(config: Config, model: HFDir) -> list[Checkpoint]:
    """What a resumed run continues from, newest first: checkpoints, or the saved steps of a run that only samples."""
    return (resume_sampling if config.rollout.only else resume).find(config, model)


def check_room(config: Config, model: HFDir) -> None:
    """Refuse a run without space for one checkpoint; partial directories of killed saves will be removed."""
    saves = config.checkpoint
    if config.rollout.only or not (saves.every_steps or saves.best_metric or saves.exit_before_timeout_s):
        return
    try:
        directory = config.run_dir / CHECKPOINTS
        check_space(directory, checkpoint_bytes(model, config), freed=disk_bytes(directory))
    except NoSpaceError as error:
        keys = "checkpoint.every_steps, best_metric and exit_before_timeout_s"
        fix = f"choose a run_dir with more space, or leave out {keys} (every_steps = 0)"
        raise UserError(str(error), where="run_dir", fix=fix) from error


def check_exports(config: Config) -> None:
    """Refuse a run that could not write its exports at its end, for example because one is a file.

    Raises:
        UserError: names the obstacle.
    """
    saves = config.checkpoint
    if saves.export_hf and not config.rollout.only:
        for name in resume.EXPORTS if saves.best_metric else resume.EXPORTS[:1]:
            check_replaceable(config.run_dir / name)


def open_inputs(config: Config, model: HFDir, norms: ModeChoice | None, checkpoints: list[Checkpoint]) -> Inputs:
    """Tokenize the training and evaluation rows, which shows whether any of them can be used."""
    if config.rollout.replay is not None:
        for checkpoint in checkpoints[:1]:
            check_replayed(checkpoint.state["data"])
        return Inputs(model, norms, None, {}, checkpoints)
    tokenizer = model.tokenizer()
    stream = PromptStream(data_for(config), tokenizer, seed=config.seed, held_out=config.evaluate.data)
    for checkpoint in checkpoints[:1]:
        stream.load_state_dict(checkpoint.state["data"])  # raises if the data differ
    held_out = {} if config.rollout.only else load_sets(config.evaluate.data, config, tokenizer)
    return Inputs(model, norms, stream, held_out, checkpoints)


def write_config(config: Config) -> None:
    """Save the resolved configuration as RUN_DIR/config.json."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.model_dump(mode="json"), indent=2)
    (config.run_dir / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
