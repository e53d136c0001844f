"""Runs of published models for the planner's tests."""

from __future__ import annotations

from typing import Any

from oblr_megatron.config import Config
from oblr_megatron.extras.planner.constants import PlannerMachine
from oblr_megatron.extras.planner.setting import Setting
from oblr_megatron.model.published import published
from oblr_megatron.observe.performance.hardware import device_named
from tests.unit.configs import config_with


def run_config(sections: dict[str, dict[str, Any]] | None = None, **parallel: Any) -> Config:
    """16 prompts of 8 responses, 512 + 1536 tokens, bf16, by default without norms."""
    table: dict[str, Any] = {
        "model": {"dtype": "bfloat16"},
        "data": {"max_prompt_tokens": 512},
        "rollout": {"max_response_tokens": 1536},
        "algo": {"baseline": "rloo", "snr": {"num_folds": 1}},
        "parallel": {"micro_batch_tokens": 2048, **parallel},
    }
    more = {name: table.get(name, {}) | fields for name, fields in (sections or {}).items()}
    return config_with(num_prompts=16, group_size=8, **table | more)


def setting(
    world_size: int,
    sections: dict[str, dict[str, Any]] | None = None,
    *,
    model: str = "Qwen3-8B",
    machine: PlannerMachine | None = None,
    **parallel: Any,
) -> Setting:
    """A run of a published model on H100s."""
    found = machine or PlannerMachine(device_named("h100"))
    return Setting(published(model), run_config(sections, **parallel), world_size, found)
