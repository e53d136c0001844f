"""Backend "train": run a study's config on the real stack (megatron-core and vLLM), from the same start and data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.plan import merged
from studies.recipe import recipe_table
from studies.results import metrics_dir

if TYPE_CHECKING:
    from studies.toy_trainer import ToyConfig


def train_table(config: ToyConfig) -> dict[str, Any]:
    """The `oblr-megatron train` config that corresponds to a toy run's config."""
    task = _task_table(config) if config.recipe is None else recipe_table(config.recipe, config.start_dir)
    return merged(
        task,
        {
            "run_dir": str(metrics_dir(Path(config.run_dir), "train")),
            "num_steps": config.num_steps,
            "seed": config.seed,
            "num_prompts": config.num_prompts,
            "group_size": config.group_size,
            "rollout": {"temperature": config.temperature, "num_threads": 1},
            "algo": config.algo.model_dump(mode="json", exclude={"preset"}),
            "gradnorm": {"source": config.norm_source},
            "optimizer": config.optimizer.model_dump(mode="json"),
            "evaluate": {
                "every_steps": config.evaluate_every,
                "samples_per_prompt": config.evaluation_samples,
                "temperature": config.temperature,
            },
            "log": {"trackers": []},
        },
    )


def _task_table(config: ToyConfig) -> dict[str, Any]:
    """Model, data, lengths and reward of a generated task."""
    from studies.start import task_named

    task, start = task_named(config.task), Path(config.start_dir)
    return {
        "model": {"path": str(start / "model"), "make_vocab_size_divisible_by": 1},
        "data": {
            "train": str(start / "train.jsonl"),
            "max_prompt_tokens": task.max_positions - task.max_response_tokens,
        },
        "rollout": {"max_response_tokens": task.max_response_tokens, "kv_cache_gib": 0.25},
        "reward": {"name": f"studies.rewards:{task.name}"},
        "evaluate": {"data": {task.name: str(start / "heldout.jsonl")}},
    }


def run_train(config: ToyConfig) -> int:
    """Run `oblr_megatron.step_loop` in this process; returns its exit status.

    Raises:
        UserError, RunError: see `run_training`.
    """
    from oblr_megatron.config import parse_config
    from oblr_megatron.step_loop import run_training

    table = json.loads(json.dumps(train_table(config)))
    return run_training(parse_config(table, "the study's config"))
