"""How large a run's checkpoint is, from the shapes in the model's files. Imports no torch."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from oblr_megatron.memory.rank_shapes import ELEMENT_BYTES

if TYPE_CHECKING:
    from oblr_megatron.checkpoint.hf_dir import HFDir
    from oblr_megatron.config import Config

FIXED_BYTES = 16 * 2**20  # tokenizer, metadata


def checkpoint_bytes(model: HFDir, config: Config) -> int:
    """Bytes of the weights, their fp32 masters if they are bf16, the optimizer's moments and the gradients' average.

    Example, Qwen3-8B in bf16 with Adam: 8.19e9 * (2 + 4 + 8) = 115 GB.
    """
    weight = ELEMENT_BYTES[config.model.dtype]
    master = max(weight, 4)
    moments = 2 if config.optimizer.name == "adam" else int(config.optimizer.sgd_momentum > 0)
    moments += config.algo.snr.estimator == "momentum"
    numbers = sum(prod(shape) for shape in model.shapes.values())
    return numbers * (weight + (master if weight < master else 0) + moments * master) + FIXED_BYTES
