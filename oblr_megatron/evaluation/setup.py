"""What an evaluation outside of a run needs: its configuration, its sets, an engine and the reward."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from oblr_megatron.errors import UserError
from oblr_megatron.evaluation.items import items_path

if TYPE_CHECKING:
    import argparse

    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.checkpoint.hf_dir import HFDir
    from oblr_megatron.config import Config
    from oblr_megatron.config.data import SourceConfig
    from oblr_megatron.engine.protocol import RolloutEngine
    from oblr_megatron.rewards.base import Reward
    from oblr_megatron.types import Prompt


def config_of(options: argparse.Namespace, model: HFDir, given: Mapping[str, Any]) -> Config:
    """The run's config, or the defaults, with what the command line says; for one process and one engine of its own.

    The defaults of prompt and response length are cut to what a small model's positions hold.

    Args:
        options: `config` and `overrides` of a command.
        model: what is evaluated.
        given: further keys that the command line sets, e.g. {"data.train": Path("gsm8k.jsonl")}.
    """
    from oblr_megatron.config import ParallelConfig, load_config, parse_config

    given = {"model.path": model.path, **given}
    if "quantization_config" in model.config:
        given |= {"rollout.dtype": "bfloat16"}  # of what is not quantised: vLLM has no FP8 product in fp32
    if options.config is not None:
        config = load_config(options.config, [*_pairs(given), *options.overrides])
    else:
        half = int(model.config.get("max_position_embeddings", 0)) // 2
        lengths = {
            "data.max_prompt_tokens": min(1024, half or 1024),
            "rollout.max_response_tokens": min(512, half or 512),
        }
        table = {"run_dir": ".", "data": {"train": "nothing is trained on"}}
        config = parse_config(table, "command line", [*_pairs(lengths | given), *options.overrides])
    alone = {"num_engines": 1, "tensor_parallel_size": 1, "servers": (), "replay": None, "only": False}
    rollout = config.rollout.model_copy(update=alone)
    return config.model_copy(update={"parallel": ParallelConfig(), "rollout": rollout})


def split_overrides(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """(data sets, overrides) out of what stands behind --data, which takes all that follows it.

    Example: ["a.jsonl", "aime=b.jsonl", "seed=1", "data.template=Q"] -> [the first two], [the last two]
    """
    from oblr_megatron.config import Config
    from oblr_megatron.config.section import section_in

    sections = {name for name, field in Config.model_fields.items() if section_in(field.annotation)}

    def is_override(text: str) -> bool:
        section, dot, _ = text.partition("=")[0].partition(".")
        known = section in sections if dot else section in Config.model_fields.keys() - sections
        return "=" in text and known

    return [text for text in texts if not is_override(text)], [text for text in texts if is_override(text)]


def named_sets(texts: Sequence[str], option: str) -> dict[str, SourceConfig]:
    """Sources as a command line names them, by the names of their sets.

    Raises:
        UserError: one has no name, or two have the same.
    """
    from oblr_megatron.data.sources import named_source

    pairs = [named_source(text) for text in texts]
    sets = dict(pairs)
    if len({items_path(Path(), name) for name in sets}) < len(pairs):
        raise UserError("two data sets have the same name", where=option, fix="write one of them as NAME=PATH")
    return sets


def load_sets(
    sources: Mapping[str, SourceConfig], config: Config, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[Prompt]]:
    """The prompts of each set, by its name; of a big one the first evaluate.num_prompts.

    Raises:
        UserError: a source cannot be used.
    """
    from oblr_megatron.data.prompt_set import load_prompts

    limit = config.evaluate.num_prompts
    return {name: load_prompts(source, config.data, tokenizer, limit=limit) for name, source in sources.items()}


@contextmanager
def opened(config: Config) -> Iterator[tuple[RolloutEngine, Reward]]:
    """A vLLM engine of config.model.path and the reward, in this one process; both end with the block."""
    from oblr_megatron.model import parallel as layout
    from oblr_megatron.rewards.registry import build_reward
    from oblr_megatron.rewards.shared import SharedReward
    from oblr_megatron.rollout.colocated import ColocatedEngines

    with ExitStack() as stack:
        scratch = stack.enter_context(TemporaryDirectory(prefix="oblr-eval-"))  # of the engine's log
        config = config.model_copy(update={"run_dir": Path(scratch)})
        parallel = layout.initialize(config.parallel, seed=config.seed)
        stack.callback(layout.shutdown)
        scoring = build_reward(config.reward, max_response_tokens=config.rollout.max_response_tokens)
        reward = stack.enter_context(SharedReward(scoring, share=0, shares=1))
        engines = ColocatedEngines(config, parallel)
        stack.callback(engines.close)
        yield engines, reward


def _pairs(given: Mapping[str, Any]) -> list[str]:
    """As overrides; text is quoted, since a path may look like a number."""
    return [f"{key}={json.dumps(v if isinstance(v, int) else str(v))}" for key, v in given.items()]
