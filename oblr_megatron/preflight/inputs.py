"""The inputs of a run, checked and opened: model, norm mode, rows, checkpoints.

The launcher calls `preflight` before torchrun, and every rank calls it again before it joins the process group. Each
problem is a `UserError`: one line, exit status 2.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.checkpoint import resume
from oblr_megatron.checkpoint.hf_dir import HFDir, check_hf_dir
from oblr_megatron.checkpoint.resume import Checkpoint
from oblr_megatron.checks.machine import (
    transformer_engine_chosen,
)
from oblr_megatron.checks.run_dir import CONFIG_FILE
from oblr_megatron.data.packing import check_folds
from oblr_megatron.data.prompt_set import prompts_digest
from oblr_megatron.data.prompts import PromptStream
from oblr_megatron.environments.registry import data_for
from oblr_megatron.errors import UserError
from oblr_megatron.evaluation.setup import load_sets
from oblr_megatron.memory.pass_plan import Layout, num_folds
from oblr_megatron.memory.select_mode import ModeChoice, free_memory, resolve, with_mode
from oblr_megatron.metrics import write_whole
from oblr_megatron.model.parallel import local_rank, local_world_size
from oblr_megatron.model.precision import this_machine
from oblr_megatron.preflight.checklist import Need, Proposed, check
from oblr_megatron.rewards.reachable import doubts
from oblr_megatron.rollout import resume_sampling
from oblr_megatron.rollout.replay import check_replayed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config import Config
    from oblr_megatron.types import Prompt


Facts = dict[str, dict[str, str]]
"""How a rank may differ -> key of the config -> digest. Example: {"reads other rows": {"data.train": "3f0c..."}}"""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The checked and opened inputs of a run."""

    model: HFDir
    norms: ModeChoice | None  # the norm mode and its memory; None if nothing is trained
    stream: PromptStream | None  # training prompts; None in a replay
    held_out: dict[str, list[Prompt]]  # evaluation sets by name
    checkpoints: list[Checkpoint]  # to resume from, the best choice first; empty: a fresh start
    tokenizer: PreTrainedTokenizerBase | None = None  # None in a replay

    def facts(self, config: Config) -> Facts:
        """What all ranks must have in common: rows, weights, the files of a user's functions, settings."""
        rows = {f"evaluate.data.{name}": prompts_digest(prompts) for name, prompts in self.held_out.items()}
        if self.stream is not None:
            rows["data.train"] = self.stream.state_dict()["fingerprint"]
        files = {key: _digest(Path(path).read_bytes()) for key, path in function_files(config).items()}
        settings = {key: _digest(json.dumps(value).encode()) for key, value in config.model_dump(mode="json").items()}
        return {
            "reads other rows": rows,
            "has other weights": {"model.path": self.model.fingerprint},
            "has another file": files,
            "has other settings": settings,
        }

    def warnings(self, config: Config) -> list[str]:
        """One line for each set with golds that no response equals; see `doubts`."""
        if self.stream is None or self.tokenizer is None:
            return []
        sets: list[tuple[str, Iterable[Prompt]]] = [(prompts.path, prompts) for prompts in self.stream.sets]
        sets += [(f"evaluate.data.{name}", prompts) for name, prompts in self.held_out.items()]
        tokens = config.rollout.max_response_tokens
        return [f"warning: {line}" for line in doubts(sets, config.reward, self.tokenizer, max_tokens=tokens)]


def preflight(config: Config, world_size: int, *, owns_run_dir: bool = True, engines: bool = True) -> Inputs:
    """Check a run and open its inputs.

    One rank `owns_run_dir`: it also checks what only this rank uses, such as the servers. The caller has checked the
    run directory itself (`check_run_dir`), because the lock in it is taken before. Without `engines` nothing is said of
    the packages that start them here: a first config may be written on a login node.

    Raises:
        UserError: the first problem.
    """
    known: tuple[Need, ...] = ("layout", "here", "device", *(("engines",) if engines else ()))
    model, on_gpu = check_hf_dir(config.model.path), torch.cuda.is_available()
    run = Proposed(config, model.config, world_size, local_world_size(world_size), on_gpu, model)
    checkpoints: list[Checkpoint] = []
    if owns_run_dir:
        check(run, *known, "owner")
        checkpoints = find_saved(config, model)
    else:
        check(run, *known)
    norms = None if config.rollout.only else choose_mode(model, config, checkpoints, world_size)
    return open_inputs(config, model, norms, checkpoints)


def check_same(by_rank: Sequence[Facts]) -> None:
    """Refuse ranks that differ from the first one, from `Inputs.facts` of all ranks.

    A file on a node's own disk may be of another version, and a config may be edited while ranks start.

    Raises:
        UserError: names the first such rank.
    """
    for rank, facts in enumerate(by_rank):
        for what, digests in facts.items():
            for key, digest in digests.items():
                if digest != by_rank[0][what].get(key):
                    raise UserError(
                        f"rank {rank} {what} than rank 0",
                        where=f"config: {key}",
                        fix="copy the same files to all nodes, or read them from a shared file system",
                    )


def function_files(config: Config) -> dict[str, str]:
    """The files of functions given as "path/to/file.py:function", by the key that names them."""
    named = {
        "algo.baseline": (config.algo.baseline,),
        "reward": config.reward.names,
        "rollout.environment": (config.rollout.environment.function, *config.rollout.environment.tools),
    }
    return {
        f"{key}: {path}": path
        for key, targets in named.items()
        for path in (target.rpartition(":")[0] for target in targets)
        if path.endswith(".py")
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


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
    """Keep the mode that "auto" chose before for the same layout and norms: modes differ in a gradient's last bits."""
    if config.gradnorm.mode != "auto" or not checkpoints:
        return config
    before = checkpoints[0].state["config"]
    kept = with_mode(config, before["gradnorm"]["mode"])
    now = kept.model_dump(mode="json")
    return kept if all(before[name] == now[name] for name in ("parallel", "algo", "gradnorm")) else config


def find_saved(config: Config, model: HFDir) -> list[Checkpoint]:
    """Saved states to continue from, newest first: checkpoints, or the saved steps of a run that only samples."""
    return (resume_sampling if config.rollout.only else resume).find(config, model)


def open_inputs(config: Config, model: HFDir, norms: ModeChoice | None, checkpoints: list[Checkpoint]) -> Inputs:
    """Tokenize the training and evaluation rows, which shows whether any of them can be used."""
    if config.rollout.replay is not None:
        for checkpoint in checkpoints[:1]:
            check_replayed(checkpoint.state["data"])
        return Inputs(model, norms, None, {}, checkpoints)
    tokenizer = model.tokenizer()
    stream = PromptStream(data_for(config, tokenizer), tokenizer, seed=config.seed, held_out=config.evaluate.data)
    for checkpoint in checkpoints[:1]:
        stream.load_state_dict(checkpoint.state["data"])  # raises if the data differ
    held_out = {} if config.rollout.only else load_sets(config.evaluate.data, config, tokenizer)
    return Inputs(model, norms, stream, held_out, checkpoints, tokenizer)


def write_config(config: Config) -> None:
    """Save the resolved configuration as RUN_DIR/config.json."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.model_dump(mode="json"), indent=2)
    write_whole(config.run_dir / CONFIG_FILE, text + "\n")
