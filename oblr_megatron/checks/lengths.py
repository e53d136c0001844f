"""Tokens of the longest prompt and response, and whether the model's positions hold them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from oblr_megatron.config import Config


def longest_evaluated(config: Config) -> int:
    """Tokens at which the responses of an evaluation are cut."""
    return config.evaluate.max_response_tokens or config.rollout.max_response_tokens


def max_model_len(config: Config) -> int:
    """Tokens of the longest prompt with the longest response that an engine is asked for, evaluations included."""
    return config.data.max_prompt_tokens + max(config.rollout.max_response_tokens, longest_evaluated(config))


def check_positions(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Refuse a prompt and response, of training or of an evaluation, that together exceed the model's positions."""
    longest = max_model_len(config)
    positions = int(hf_config.get("max_position_embeddings", longest))
    if longest > positions:
        response = longest - config.data.max_prompt_tokens
        field = "rollout" if response == config.rollout.max_response_tokens else "evaluate"
        raise UserError(
            f"data.max_prompt_tokens {config.data.max_prompt_tokens} + {field}.max_response_tokens {response} = "
            f"{longest} exceeds the model's max_position_embeddings {positions}",
            where=str(config.model.path),
            fix="lower one of the two",
        )
