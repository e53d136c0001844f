"""What cannot be pushed, or not be read back, found out from the configuration before any process is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oblr_megatron.checks import num_experts
from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from oblr_megatron.config import Config


def check_pushable(hf_config: Mapping[str, Any], config: Config, *, on_gpu: bool) -> None:
    """Refuse mixtures of experts where vLLM keeps the experts' weights in a layout that only its kernels read.

    Args:
        hf_config: the model's config.json.
        config: of the run.
        on_gpu: where trainer and engines are.

    Raises:
        UserError: the engines run on a CPU, or weights.verify is on.
    """
    if not num_experts(hf_config) or config.rollout.replay is not None:
        return
    if not on_gpu:
        raise UserError(
            "an engine on a CPU cannot be sent a mixture of experts: vLLM packs the experts' weights there once, when "
            "it loads them, and an update would not reach what it computes with",
            where=str(config.model.path),
            mend="run it on GPUs, or train on saved samples (rollout.replay)",
        )
    if config.weights.verify:
        raise UserError(
            "weights.verify cannot read a mixture's experts back: vLLM keeps them in its kernels' layout",
            where="config: weights.verify",
            mend="set it to false",
        )
