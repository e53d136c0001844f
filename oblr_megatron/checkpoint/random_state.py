"""The random states of one process: Python's, numpy's, torch's, CUDA's, and those that megatron-core tracks.

Nothing in a step draws from them today (samples and folds have seeds of their own); a reward function, a dropout or a
library may.
"""

from __future__ import annotations

import random
from typing import Any, cast

import numpy
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

RandomState = dict[str, Any]


def random_state() -> RandomState:
    """All of them, as tensors and plain numbers."""
    name, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: RandomState) -> None:
    """Go on from `random_state`."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])
