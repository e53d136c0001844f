"""Megatron's options of the `parallel` section that a run's gradient norms, or its step loop, do not allow.

Imports no torch. docs/parallel.md has the same as a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from oblr_megatron.config import Config

TOTAL_ALONE = ("momentum",)
"""Estimators of the signal that ask for nothing but the batch's whole gradient."""
UNUSABLE = {
    "overlap_param_gather": (
        "every step sends the weights to the engines as soon as they are updated, so there is no next forward during "
        "which they could be gathered",
        "use_distributed_optimizer gathers them without it",
    ),
    "overlap_moe_expert_parallel_comm": (
        "megatron-core's schedule for it cuts a forward into pieces and interleaves two microbatches, and ours tells "
        "the backward of each microbatch apart",
        "expert parallelism works without it",
    ),
    "delay_wgrad_compute": (
        "it goes with overlap_moe_expert_parallel_comm, which cannot be used either",
        "weight gradients are made with the input gradients",
    ),
}
"""Option -> why no run can use it, what there is instead."""


def check_parallel_options(config: Config, where: str) -> None:
    """Refuse what cannot work together with the rest of the configuration.

    Raises:
        UserError: the option, why not, and what to change.
    """
    _check_unusable(config, where)
    _check_distributed_optimizer(config, where)
    _check_weight_gradients(config, where)
    _check_overlap(config, where)
    _check_deferred(config, where)
    _check_recompute(config, where)


def _check_unusable(config: Config, where: str) -> None:
    parallel = config.parallel
    for name, (reason, instead) in UNUSABLE.items():
        if getattr(parallel, name):
            raise UserError(f"parallel.{name} cannot be used: {reason}", where=where, fix=f"set it to false; {instead}")
    if parallel.cuda_graph_impl != "none":
        raise UserError(
            f"parallel.cuda_graph_impl {parallel.cuda_graph_impl!r} cannot be used: a graph replays one shape, and "
            "microbatches differ in length",
            where=where,
            fix='set it to "none"',
        )


def _check_distributed_optimizer(config: Config, where: str) -> None:
    """megatron-core's is an Adam with fp32 moments, and refuses any other."""
    if not config.parallel.use_distributed_optimizer:
        return
    if config.optimizer.name != "adam":
        raise UserError(
            f"parallel.use_distributed_optimizer with optimizer.name {config.optimizer.name!r}: megatron-core shards "
            "Adam alone",
            where=where,
            fix='set optimizer.name to "adam", or use_distributed_optimizer to false',
        )
    if config.model.dtype == "float64":
        raise UserError(
            "parallel.use_distributed_optimizer with model.dtype 'float64': megatron-core's updates fp32 weights or "
            "fp32 masters",
            where=where,
            fix='set model.dtype to "float32" or "bfloat16", or use_distributed_optimizer to false',
        )


def _check_weight_gradients(config: Config, where: str) -> None:
    """Norms are taken where weight gradients are made (model/taps.py), which these options move elsewhere."""
    parallel = config.parallel
    options = ("overlap_grad_reduce", "gradient_accumulation_fusion", "defer_embedding_wgrad_compute")
    for name in options:
        if getattr(parallel, name) and config.uses_norms:
            cause = "gradnorm.always" if config.gradnorm.always else f"algo.baseline {config.algo.baseline!r}"
            raise UserError(
                f"parallel.{name} makes weight gradients where no norm of a response's own can be taken, which {cause} "
                "asks for",
                where=where,
                fix=f'set {name} to false, or take a baseline without norms ("rloo", "rloo_prior", "group_mean", '
                "...) and gradnorm.always = false",
            )


def _check_overlap(config: Config, where: str) -> None:
    """A fold's own gradient, whose norm most estimators want, is gone once the sum over replicas has begun."""
    snr = config.algo.snr
    if not config.parallel.overlap_grad_reduce or snr.estimator in TOTAL_ALONE:
        return
    raise UserError(
        f"parallel.overlap_grad_reduce with algo.snr.estimator {snr.estimator!r}: it needs the norm of each fold's "
        "gradient before the sum over replicas, which backward then has begun",
        where=where,
        fix='set algo.snr.estimator to "momentum", or overlap_grad_reduce to false',
    )


def _check_deferred(config: Config, where: str) -> None:
    """What megatron-core itself asks for, and a bucket that would be summed before its last gradient is made."""
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
            fix="set what is named, or defer_embedding_wgrad_compute to false",
        )


def _check_recompute(config: Config, where: str) -> None:
    """megatron-core cannot run these again under FP8 scales that are taken from earlier steps."""
    parallel = config.parallel
    again = sorted({"layernorm", "moe_act"} & set(parallel.recompute_modules))
    delayed = config.model.fp8 != "none" and config.model.fp8_recipe == "delayed"
    if parallel.recompute_granularity == "selective" and again and delayed:
        raise UserError(
            f"parallel.recompute_modules {again[0]!r} with model.fp8_recipe 'delayed'",
            where=where,
            fix='leave it out, or set model.fp8_recipe to "tensorwise", "blockwise" or "mxfp8"',
        )
