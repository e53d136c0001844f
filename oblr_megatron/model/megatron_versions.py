"""Differences between the accepted versions of megatron-core (0.16.1 to 0.19). No other module asks for the version.

Checkpoints need nothing here: `checkpoint/torch_files.py` writes the same two files under every version.
"""

from __future__ import annotations

import logging
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication
from torch import Tensor, nn

_linear = LinearWithGradAccumulationAndAsyncCommunication
# 0.19 shards weights over a group of its own if `gtp_remat_size` is above 1, and wants the argument from every caller.
_LAST_ARGUMENTS = (1,) if "gtp_remat_size" in signature(_linear.forward).parameters else ()


def linear_forward(
    ctx: Any,
    input: Tensor,
    weight: nn.Parameter,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    group: dist.ProcessGroup,
) -> Tensor:
    """Forward of megatron-core's linear layer, without bias and without its own accumulation of gradients."""
    return _linear.forward(
        ctx, input, weight, None, False, allreduce_dgrad, sequence_parallel, None, None, group, *_LAST_ARGUMENTS
    )
