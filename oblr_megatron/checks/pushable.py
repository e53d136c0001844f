"""What cannot be read back after a push, found out from the configuration before any process is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from oblr_megatron.config import Config


def check_pushable(hf_config: Mapping[str, Any], config: Config, *, on_gpu: bool) -> None:
    """Refuse to verify a mixture's experts where vLLM keeps their weights in a layout that only its kernels read.

    Args:
        hf_config: the model's config.json.
        config: of the run.
        on_gpu: where trainer and engines are. On a CPU experts are kept as they were loaded (`rollout.vllm_experts`).

    Raises:
        UserError: weights.verify is on, for a mixture on GPUs.
    """
    if on_gpu and num_experts(hf_config) and config.weights.verify and config.rollout.replay is None:
        raise UserError(
            "weights.verify cannot read a mixture's experts back: vLLM keeps them in its GPU kernels' layout",
            where="config: weights.verify",
            fix="set it to false",
        )
