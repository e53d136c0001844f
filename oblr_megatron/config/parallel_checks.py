"""Checks of Megatron's options in [parallel] against norms, estimators and the optimizer. Imports no torch.

docs/parallel.md has the same rules as a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from oblr_megatron.config import Config

TOTAL_ALONE = ("momentum",)
"""Estimators of the signal that need only the gradient of the whole batch."""


def check_parallel_options(config: Config, where: str) -> None:
    """Refuse options that do not work with the rest of the configuration.

    Raises:
        UserError: names the option, the reason and the fix.
    """
    _check_distributed_optimizer(config, where)
    _check_weight_gradients(config, where)
    _check_overlap(config, where)
    _check_deferred(config, where)
    _check_recompute(config, where)


def _check_distributed_optimizer(config: Config, where: str) -> None:
    """megatron-core's distributed optimizer supports only Adam with fp32 moments."""
    if not config.parallel.use_distributed_optimizer:
        return
    if config.optimizer.name != "adam":
        raise UserError(
            f"parallel.use_distributed_optimizer with optimizer.name {config.optimizer.name!r}: megatron-core shards "
            "only Adam",
            where=where,
            fix='set optimizer.name to "adam", or use_distributed_optimizer to false',
        )
    if config.model.dtype == "float64":
        raise UserError(
            "parallel.use_distributed_optimizer with model.dtype 'float64': megatron-core updates only fp32 weights or "
            "fp32 masters",
            where=where,
            fix='set model.dtype to "float32" or "bfloat16", or use_distributed_optimizer to false',
        )


def _check_weight_gradients(config: Config, where: str) -> None:
    """Norms are measured in the backward of linear layers (model/taps.py), which these options bypass."""
    parallel = config.parallel
    options = ("overlap_grad_reduce", "gradient_accumulation_fusion", "defer_embedding_wgrad_compute")
    for name in options:
        if getattr(parallel, name) and config.uses_norms:
            cause = "gradnorm.always" if config.gradnorm.always else f"algo.baseline {config.algo.baseline!r}"
            raise UserError(
                f"parallel.{name} allows no per-response norms, but {cause} needs them",
                where=where,
                fix=f'set {name} to false, or use a baseline without norms ("rloo", "rloo_prior", "group_mean", '
                "...) and gradnorm.always = false",
            )


def _check_overlap(config: Config, where: str) -> None:
    """Most estimators need the norm of each fold's gradient, but overlap starts the reduce before it is complete."""
    snr = config.algo.snr
    if not config.parallel.overlap_grad_reduce or snr.estimator in TOTAL_ALONE:
        return
    raise UserError(
        f"parallel.overlap_grad_reduce with algo.snr.estimator {snr.estimator!r}: the estimator needs the norm of each "
        "fold's gradient, but the reduce over replicas starts before that gradient is complete",
        where=where,
        fix='set algo.snr.estimator to "momentum", or overlap_grad_reduce to false',
    )


def _check_deferred(config: Config, where: str) -> None:
    """megatron-core's conditions; with overlap a bucket would be reduced before its last gradient is computed."""
    parallel = config.parallel
    if not parallel.defer_embedding_wgrad_compute:
        return
    missing = [
        text
        for absent, text in (
            (not parallel.gradient_accumulation_fusion, "gradient_accumulation_fusion = true"),
            (parallel.pipeline_model_parallel_size == 1, "pipeline_model_parallel_size of 2 or more"),
            (parallel.overlap_grad_reduce, "overlap_grad_reduce = false"),
        )
        if absent
    ]
    if missing:
        raise UserError(
            f"parallel.defer_embedding_wgrad_compute needs {', '.join(missing)}",
            where=where,
            fix="set these, or set defer_embedding_wgrad_compute to false",
        )


def _check_recompute(config: Config, where: str) -> None:
    """megatron-core cannot recompute these modules with delayed FP8 scaling."""
    parallel = config.parallel
    again = sorted({"layernorm", "moe_act"} & set(parallel.recompute_modules))
    delayed = config.model.fp8 != "none" and config.model.fp8_recipe == "delayed"
    if parallel.recompute_granularity == "selective" and again and delayed:
        raise UserError(
            f"parallel.recompute_modules {again[0]!r} with model.fp8_recipe 'delayed'",
            where=where,
            fix='leave it out, or set model.fp8_recipe to "tensorwise", "blockwise" or "mxfp8"',
        )
