"""Configuration, data sets, engine and reward of an evaluation outside of a training run."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from oblr_megatron.errors import UserError
from oblr_megatron.evaluation.items import items_path

if TYPE_CHECKING:
    import argparse

    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.checkpoint.hf_dir import HFDir
    from oblr_megatron.checkpoint.peft_dir import AdapterDir
    from oblr_megatron.config import Config
    from oblr_megatron.config.data import SourceConfig
    from oblr_megatron.engine.protocol import RolloutEngine
    from oblr_megatron.rewards.base import Reward
    from oblr_megatron.types import Prompt


logger = logging.getLogger(__name__)


def config_of(options: argparse.Namespace, model: HFDir, given: Mapping[str, Any]) -> Config:
    """A config for one process with one local engine: the run's, or the defaults, plus the command line.

    Default prompt and response lengths are reduced to fit the positions of a small model.

    Args:
        options: `config` and `overrides` of a command.
        model: the model to evaluate.
        given: further keys set by the command line, e.g. {"data.train": Path("gsm8k.jsonl")}.

    Raises:
        UserError: the config is invalid, or an override asks for more than one engine on one device.
    """
    from oblr_megatron.config import ParallelConfig, load_config, parse_config

    # in a run the engine shares its GPU with the trainer; here it has a GPU of its own
    alone = {"rollout.gpu_memory_utilization": 0.9, "rollout.quantization": "none"}  # the model as it is
    given = {"model.path": model.path, "checkpoint.best_metric": "", **alone, **given}
    if model.config.get("quantization_config") is not None:
        given |= {"rollout.dtype": "bfloat16"}  # of the weights that are not rounded: vLLM has no FP8 matmul in fp32
    if options.config is not None:
        config = load_config(options.config, [*_pairs(given), *options.overrides])
    else:
        half = int(model.config.get("max_position_embeddings", 0)) // 2
        lengths = {
            "data.max_prompt_tokens": min(1024, half or 1024),
            "rollout.max_response_tokens": min(512, half or 512),
        }
        table = {"run_dir": ".", "data": {"train": "unused"}}
        config = parse_config(table, "command line", [*_pairs(lengths | given), *options.overrides])
    one = {"num_engines": 1, "tensor_parallel_size": 1, "servers": (), "replay": None, "only": False}
    one["overlap"] = "none"  # nothing is trained meanwhile
    for text in options.overrides:
        section, _, key = text.partition("=")[0].strip().partition(".")
        if section == "parallel" or (section == "rollout" and key in one and getattr(config.rollout, key) != one[key]):
            what, fix = f"{section}.{key} has no effect: the command has one engine on one device", "leave it out"
            raise UserError(what, where=text, fix=fix)
    rollout = config.rollout.model_copy(update=one)
    return config.model_copy(update={"parallel": ParallelConfig(), "rollout": rollout})


def split_overrides(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate (data sets, overrides): --data takes all arguments that follow it.

    Example: ["a.jsonl", "aime=b.jsonl", "seed=1", "data.template=Q"] -> [the first two], [the last two]

    Raises:
        UserError: a text looks like an override of a misspelt section, and names no file.
    """
    from oblr_megatron.config import Config
    from oblr_megatron.config.section import section_in

    sections = {name for name, field in Config.model_fields.items() if section_in(field.annotation)}

    def is_override(text: str) -> bool:
        section, dot, _ = text.partition("=")[0].strip().partition(".")
        known = section in sections if dot else section in Config.model_fields.keys() - sections
        return "=" in text and known

    for text in texts:
        key, _, value = text.partition("=")
        near = get_close_matches(key.partition(".")[0], sections, 1)
        if near and not is_override(text) and re.fullmatch(r"\w+(\.\w+)+", key) and not Path(value).exists():
            fix = f"did you mean {near[0]}.{key.partition('.')[2]}?"
            raise UserError(f"{key!r} is neither a key of the config nor the name of a file", where=text, fix=fix)
    return [text for text in texts if not is_override(text)], [text for text in texts if is_override(text)]


def named_sets(texts: Sequence[str], option: str) -> dict[str, SourceConfig]:
    """The sources of command-line arguments, by name.

    Raises:
        UserError: a set has no name, or two sets have the same name.
    """
    from oblr_megatron.data.sources import named_source

    pairs = [named_source(text) for text in texts]
    sets = dict(pairs)
    if len({items_path(Path(), name) for name in sets}) < len(pairs):
        raise UserError("two data sets have the same name", where=option, fix="write one as NAME=PATH")
    return sets


def load_sets(
    sources: Mapping[str, SourceConfig], config: Config, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[Prompt]]:
    """The prompts of each set by name; at most evaluate.num_prompts per set.

    Raises:
        UserError: a source cannot be read or has no usable row.
    """
    from oblr_megatron.data.prompt_set import read_prompts
    from oblr_megatron.environments.registry import data_for

    if not sources:
        return {}
    limit, data = config.evaluate.num_prompts, data_for(config, tokenizer)
    return {name: list(read_prompts(source, data, tokenizer, limit=limit)) for name, source in sources.items()}


def warn_of_golds(sets: Mapping[str, Sequence[Prompt]], config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """One line for each set with golds that no response equals: accuracy would be 0 for reasons of the data."""
    from oblr_megatron.checks.lengths import longest_evaluated
    from oblr_megatron.rewards.reachable import doubts

    for line in doubts(sets.items(), config.reward, tokenizer, max_tokens=longest_evaluated(config)):
        logger.warning(line)


def check_engine(config: Config, model: HFDir) -> None:
    """Check what the engine of `opened` needs of this machine, the package and the options.

    Raises:
        UserError: the first problem found.
    """
    import torch

    from oblr_megatron.checks.machine import build_problem, check_head_size, refuse
    from oblr_megatron.checks.vllm_options import check_processor, check_speculation, check_vllm_options
    from oblr_megatron.memory.engine import check_cache, engine_bytes

    on_gpu = torch.cuda.is_available()
    device_bytes = torch.cuda.get_device_properties(0).total_memory if on_gpu else None
    check_head_size(model.config, model.path, on_gpu=on_gpu)
    refuse(build_problem(on_gpu=on_gpu))
    check_speculation(config.rollout.speculation, "config: rollout.speculation")
    check_vllm_options(config.rollout.vllm, on_gpu=on_gpu)
    check_processor(config.rollout.vllm, on_gpu=on_gpu)
    if model.config.get("quantization_config") is not None:  # the weights are rounded already
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"quantization": "fp8"})})
    try:
        check_cache(engine_bytes(model.config, config, device_bytes=device_bytes), config)
    except UserError as error:
        fix = "lower rollout.max_response_tokens, or evaluate in a run: its engines may have several GPUs"
        if config.engine_dtype != "bfloat16":
            fix = f"set rollout.dtype=bfloat16, {fix}"
        raise UserError(error.what, where=error.where, fix=fix if on_gpu else error.fix) from error


@contextmanager
def opened(config: Config, adapter: AdapterDir | None = None) -> Iterator[tuple[RolloutEngine, Reward]]:
    """A local vLLM engine with config.model.path and an adapter, and the reward; closed at the end of the block."""
    from oblr_megatron.model import parallel as process_groups
    from oblr_megatron.observe.console import waiting
    from oblr_megatron.rewards.registry import build_reward
    from oblr_megatron.rewards.shared import SharedReward
    from oblr_megatron.rollout.colocated import ColocatedEngines

    with ExitStack() as stack:
        scratch = stack.enter_context(TemporaryDirectory(prefix="oblr-eval-"))  # for the engine's log
        config = config.model_copy(update={"run_dir": Path(scratch)})
        parallel = process_groups.initialize(config.parallel, seed=config.seed, alone=True)
        stack.callback(process_groups.shutdown)
        scoring = build_reward(config.reward, max_response_tokens=config.rollout.max_response_tokens)
        reward = stack.enter_context(SharedReward(scoring, share=0, shares=1))
        say = partial(print, file=sys.stderr, flush=True)
        shape, held = (None, None) if adapter is None else (adapter.shape, adapter.path.absolute())
        engines = ColocatedEngines(config, parallel, partial(waiting, say=say), lora=shape, adapter=held)
        stack.callback(engines.close)
        yield engines, reward


def _pairs(given: Mapping[str, Any]) -> list[str]:
    """The keys as overrides; text is quoted, because a path may look like a number."""
    quoted = {key: v if isinstance(v, int | float) else str(v) for key, v in given.items()}
    return [f"{key}={json.dumps(v, ensure_ascii=False)}" for key, v in quoted.items()]  # TOML has no surrogates
