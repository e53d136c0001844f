"""Checks of [parallel] against norms, estimators and the optimizer. Imports no torch.

docs/parallel.md has the same rules as a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from oblr_megatron.errors import Problem

if TYPE_CHECKING:
    from oblr_megatron.config import Config


def parallel_problems(config: Config) -> Iterator[Problem]:
    """Options that do not work with the rest of the configuration, with the reason and the fix."""
    yield from _distributed_optimizer(config)
    snr, overlaps = config.algo.snr, config.parallel.overlap_grad_reduce
    if overlaps and config.uses_norms:  # they are measured in the backward of linear layers (model/taps.py)
        other = "gradnorm.always" if config.gradnorm.always else f"algo.baseline {config.algo.baseline!r}"
        cause = config.reads_own_norms or other
        yield (
            f"parallel.overlap_grad_reduce allows no per-response norms, but {cause} needs them",
            'set it to false, or use a baseline without norms ("rloo", "group_mean", ...), algo.norm_power = 0 and '
            "gradnorm.always = false",
        )
    if overlaps and snr.needs_folds:
        yield (
            f"parallel.overlap_grad_reduce with algo.snr.estimator {snr.estimator!r}: the estimator needs the norm of "
            "each fold's gradient, but the reduce over replicas starts before that gradient is complete",
            'set algo.snr.estimator to "momentum", or overlap_grad_reduce to false',
        )
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        what = "sequence_parallel needs tensor_model_parallel_size of 2 or more"
        yield what, "set parallel.sequence_parallel to false"


def _distributed_optimizer(config: Config) -> Iterator[Problem]:
    """megatron-core's distributed optimizer supports only Adam with fp32 moments."""
    if not config.parallel.use_distributed_optimizer:
        return
    option, name = "parallel.use_distributed_optimizer", config.optimizer.name
    if name != "adam":
        what = f"{option} with optimizer.name {name!r}: megatron-core shards only Adam"
        yield what, 'set optimizer.name to "adam", or use_distributed_optimizer to false'
    if config.model.dtype == "float64":
        what = f"{option} with model.dtype 'float64': megatron-core updates only fp32 weights or fp32 masters"
        yield what, 'set model.dtype to "float32" or "bfloat16", or use_distributed_optimizer to false'
