"""The planner's input: model, machine, sizes of a step, and the rest of the run. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oblr_megatron.config import Config, parse_config
from oblr_megatron.memory.select_mode import MODES
from oblr_megatron.planner.constants import Machine


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Example: `oblr-megatron plan --model Qwen3-8B --gpus 64 --sequence-length 8192`."""

    model: str
    hf_config: Mapping[str, Any]
    gpus: int  # of the trainer
    memory_bytes: int  # of a GPU
    machine: Machine
    prompt_tokens: int  # mean of a prompt; the command takes the longest
    mean_response_tokens: int
    table: Mapping[str, Any]  # the rest of the run, as in a config file
    modes: tuple[str, ...] = MODES[::-1]
    engine_gpus: int = 0  # that only sample; 0: engines share the trainer's
    speculation_acceptance: float = 0.0  # see `Setting`
    keep_free: int = 2 * 2**30  # bytes per GPU for CUDA, NCCL and fragmentation

    def config(self, layout: Mapping[str, Any]) -> Config:
        """The run with the sections of a layout.

        Raises:
            UserError: fields contradict each other.
        """
        sections = {
            name: {**self.table.get(name, {}), **fields} if isinstance(fields, Mapping) else fields
            for name, fields in layout.items()
        }
        return parse_config({**self.table, **sections}, "plan")


def base_table(
    *, model: str, prompts: int, group_size: int, prompt_tokens: int, sequence_length: int, dtype: str
) -> dict[str, Any]:
    """A run with these sizes and defaults otherwise."""
    return {
        "run_dir": "runs/plan",
        "num_prompts": prompts,
        "group_size": group_size,
        "model": {"path": model, "dtype": dtype},
        "data": {"train": "train.jsonl", "max_prompt_tokens": prompt_tokens},
        "rollout": {"max_response_tokens": sequence_length - prompt_tokens},
    }
