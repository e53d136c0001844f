"""Differences between the accepted versions of megatron-core (0.16.1 to 0.19). No other module asks for the version.

Checkpoints need nothing here: `checkpoint/torch_files.py` writes the same two files under every version.
"""

from __future__ import annotations

import fcntl
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.tensor_parallel import random as recomputation
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication
from megatron.core.transformer.spec_utils import ModuleSpec
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


def compile_recomputation() -> None:
    """Compile the extension by which 0.19 recomputes norms and activations of experts, or load it; for every rank.

    Otherwise the first backward pass does it, under a lock file of torch's that outlives a killed process: each later
    run would wait for it without end. This lock is the kernel's, and its holder removes such a file.
    """
    from torch.utils.cpp_extension import _get_build_directory

    extension = getattr(recomputation, "_get_share_storage", None)
    if extension is None:  # before 0.19
        return
    directory = Path(_get_build_directory("share_storage_ext", verbose=False))
    with (directory / "oblr_megatron.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            (directory / "lock").unlink()
        extension()


def mlp_submodules(layer: ModuleSpec) -> Any:
    """The parts of the MLP (MLPSubmodules) or of the mixture (MoESubmodules) in the spec of a transformer layer."""
    mlp = layer.submodules.mlp
    return mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]  # a partial from 0.18 on


def take_rates(stored: list[dict[str, Any]], current: list[dict[str, Any]]) -> None:
    """Give stored parameter groups the settings of the run's own groups, which are the same in each of them.

    From 0.19 on megatron-core finds a stored group by its rates too. A run that resumes with another `optimizer.lr`
    would find none. The rate of a step is set before the step, see `PolicyOptimizer.step`. torch would keep the stored
    betas, eps and momentum.
    """
    keys = {"max_lr", "min_lr", "start_wd", "end_wd"}.intersection(param_group_identifier_keys)
    keys |= {"betas", "eps", "momentum"}
    rates = {key: group[key] for group in current for key in keys & group.keys()}
    for group in stored:
        group.update(rates)
