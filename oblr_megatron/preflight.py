"""Everything that can be found wrong before a process is started: model directory, layout, data, reward, run directory.

Called by the launcher before torchrun, and again by every rank before it joins the process group; each finding is a
`UserError`, one line, exit status 2.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from oblr_megatron.checkpoint.hf_dir import HFDir, check_hf_dir
from oblr_megatron.checks import check_layout
from oblr_megatron.data.packing import check_folds
from oblr_megatron.data.prompts import PromptStream, load_prompts
from oblr_megatron.errors import UserError
from oblr_megatron.gradnorm.choose import Choice, free_memory, resolve, with_mode
from oblr_megatron.gradnorm.passes import Layout, num_folds
from oblr_megatron.rewards.registry import check_reward
from oblr_megatron.rollout.placement import place
from oblr_megatron.rollout.replay import check_replay
from oblr_megatron.rollout.server_checks import check_servers
from oblr_megatron.weights.limits import check_pushable

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.types import Prompt


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run reads, opened and found usable."""

    model: HFDir
    norms: Choice | None  # how gradients' norms are computed, and what a step takes; None where nothing is trained
    stream: PromptStream | None  # of training prompts; None where saved ones are replayed
    held_out: dict[str, list[Prompt]]  # evaluation sets by name; empty where none is evaluated


def preflight(config: Config, world_size: int, *, owns_run_dir: bool = True) -> Inputs:
    """Check a run as a whole, and open what it reads.

    Args:
        config: the resolved configuration.
        world_size: ranks the run will have.
        owns_run_dir: whether this process checks the run directory; one rank does, since it is about to write there.

    Raises:
        UserError: the first thing found wrong.
    """
    if owns_run_dir:
        check_run_dir(config.run_dir)
    model = check_hf_dir(config.model.path)
    check_layout(model.config, config, world_size)
    norms = None if config.rollout.only else check_gradient(model, config, world_size)
    if config.rollout.replay is None and config.rollout.servers:
        check_servers(config)
    elif config.rollout.replay is None:
        place(config, world_size, on_gpu=torch.cuda.is_available())
    check_pushable(model.config, config, on_gpu=torch.cuda.is_available())
    check_reward(config.reward)
    check_lengths(config, model)
    if owns_run_dir:
        check_replay(config, int(model.config["vocab_size"]))
    return _open_inputs(config, model, norms)


def check_gradient(model: HFDir, config: Config, world_size: int) -> Choice:
    """How the gradient's norms are computed, with folds that divide among the ranks.

    Raises:
        UserError: see `choose_norms`; or the folds do not divide.
    """
    norms = choose_norms(model, config, world_size)
    layout = Layout.of(model.config, with_mode(config, norms.mode), world_size)
    check_folds(config.num_prompts, num_folds(config), layout.replicas // layout.sharing)
    return norms


def choose_norms(model: HFDir, config: Config, world_size: int) -> Choice:
    """What `gradnorm.mode` comes to, by the memory there is; ranks may differ in that, so that one of them decides.

    Raises:
        UserError: the mode is impossible in this layout, or does not fit.
    """
    on_gpu = torch.cuda.is_available()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # torchrun's; a launcher starts all of them here
    return resolve(
        model.config,
        config,
        world_size,
        free_bytes=torch.cuda.mem_get_info()[1] if on_gpu else free_memory(local_ranks),
        on_gpu=on_gpu,
        transformer_engine=on_gpu and importlib.util.find_spec("transformer_engine") is not None,
    )


def check_run_dir(run_dir: Path) -> None:
    """Refuse to write into a directory that holds another run."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError("run_dir is a file", where=str(run_dir), mend="name a directory")
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise UserError("run_dir is not empty", where=str(run_dir), mend="name a new directory, or remove this one")
    present = next(place for place in (run_dir.absolute(), *run_dir.absolute().parents) if os.path.lexists(place))
    if not present.is_dir() or not os.access(present, os.W_OK | os.X_OK):
        raise UserError(
            f"run_dir cannot be made: {present} is no directory that can be written to",
            where=str(run_dir),
            mend="name a directory of your own",
        )


def check_lengths(config: Config, model: HFDir) -> None:
    """Refuse a prompt and response that together exceed the model's positions."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    positions = int(model.config.get("max_position_embeddings", longest))
    if longest > positions:
        raise UserError(
            f"data.max_prompt_tokens {config.data.max_prompt_tokens} + rollout.max_response_tokens "
            f"{config.rollout.max_response_tokens} = {longest} exceeds the model's max_position_embeddings {positions}",
            where=str(config.model.path),
            mend="lower one of the two",
        )


def _open_inputs(config: Config, model: HFDir, norms: Choice | None) -> Inputs:
    """Tokenize the training and evaluation rows: only then is it known whether any of them can be used."""
    if config.rollout.replay is not None:
        return Inputs(model, norms, None, {})
    tokenizer = model.tokenizer()
    stream = PromptStream(config.data, tokenizer, seed=config.seed)
    held_out = {
        name: load_prompts(path, config.data, tokenizer, limit=config.evaluate.num_prompts)
        for name, path in config.evaluate.data.items()
        if not config.rollout.only
    }
    return Inputs(model, norms, stream, held_out)


def write_config(config: Config) -> None:
    """Save the resolved configuration beside the run, as RUN_DIR/config.json."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.model_dump(mode="json"), indent=2)
    (config.run_dir / "config.json").write_text(text + "\n", encoding="utf-8")
