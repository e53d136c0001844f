"""Tokens of the longest prompt and response, and whether they fit the model's positions. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from oblr_megatron.config import Config


def longest_evaluated(config: Config) -> int:
    """Tokens of the longest response in an evaluation."""
    return config.evaluate.max_response_tokens or config.rollout.max_response_tokens


def max_model_len(config: Config) -> int:
    """Tokens of the longest prompt and response that an engine handles, evaluations included."""
    return config.data.max_prompt_tokens + max(config.rollout.max_response_tokens, longest_evaluated(config))


def check_positions(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Refuse lengths, of training or of an evaluation, that exceed the model's positions."""
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
