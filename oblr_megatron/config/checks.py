"""Overrides from the command line, and checks across sections of a configuration. Imports no torch."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oblr_megatron.config.baselines import BASELINES
from oblr_megatron.config.parallel_checks import check_parallel_options
from oblr_megatron.config.precision_checks import check_precision
from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from oblr_megatron.config import Config

EVALUATED = ("accuracy", "mean_at_k", "pass_at_k", "maj_at_k")
"""Metrics of each held-out set; only the first needs no sampled responses."""


def apply_override(table: dict[str, Any], override: str) -> None:
    """Set one dotted key. The value is read as TOML, or as a plain string if it is no TOML (paths, names)."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise UserError(
            f"override {override!r} is not section.key=value", where="command line", fix="write e.g. optimizer.lr=1e-6"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise UserError(
                f"{parent!r} is a value, not a section", where=f"override {override}", fix="name a key of a section"
            )
    table[leaf] = value


def check_together(config: Config, where: str) -> None:
    """Check fields of different sections against each other.

    Raises:
        UserError: the first contradiction.
    """
    baseline = BASELINES[config.algo.baseline]
    if config.group_size == 1 and baseline.leave_one_out:
        raise UserError(
            f"group_size is 1, but baseline {config.algo.baseline!r} needs other responses in the group",
            where=where,
            fix='set group_size to 2 or more, or algo.baseline to "none"',
        )
    if baseline.prior and config.num_prompts == 1:
        raise UserError(
            f"num_prompts is 1, but baseline {config.algo.baseline!r} takes its prior from the other prompts",
            where=where,
            fix='set num_prompts to 2 or more, or algo.baseline to "optimal" or "rloo"',
        )
    _check_coefficients(config, where)
    check_parallel_options(config, where)
    _check_router_losses(config, where)
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        raise UserError(
            "sequence_parallel needs tensor_model_parallel_size of 2 or more",
            where=where,
            fix="set parallel.sequence_parallel to false",
        )
    if config.num_prompts % config.algo.snr.num_folds:
        raise UserError(
            f"num_prompts {config.num_prompts} is not a multiple of algo.snr.num_folds {config.algo.snr.num_folds}",
            where=where,
            fix="change one of them; folds hold equally many whole prompts",
        )
    _check_samples(config, where)
    _check_checkpoints(config, where)
    _check_data(config, where)
    _check_profile(config, where)
    check_precision(config, where)
    push, patience = config.rollout.push_timeout_s, config.parallel.distributed_timeout_s
    if push >= patience:
        raise UserError(
            f"rollout.push_timeout_s {push:g} is not below parallel.distributed_timeout_s {patience:g}: ranks that "
            "gather weights would time out before the rank that waits for its engine",
            where=where,
            fix="lower the first or raise the second",
        )


def _check_coefficients(config: Config, where: str) -> None:
    """One-pass modes scale each response's gradient by one number A; the "samples" estimator squares that number."""
    mode, what = config.gradnorm.mode, None
    if config.algo.token_wise:
        what = f"algo.baseline {config.algo.baseline!r} has one advantage per token"
    elif config.algo.kl_coefficient:
        what = f"algo.kl_coefficient {config.algo.kl_coefficient:g} adds a gradient without an advantage"
    elif config.model.router_losses:
        what = "a router loss (model.moe_aux_loss_coeff, moe_z_loss_coeff) adds a gradient of no single sample"
    if what and mode in ("stash", "bookkeep"):
        raise UserError(
            f"{what}, which gradnorm.mode {mode!r} does not support",
            where=where,
            fix='set gradnorm.mode to "two_pass" or "auto"',
        )
    if config.algo.token_wise and config.algo.snr.estimator == "samples":
        raise UserError(
            f"algo.snr.estimator 'samples' needs one advantage per response, but baseline {config.algo.baseline!r} has "
            "one per token",
            where=where,
            fix='set algo.snr.estimator to "folds"',
        )


def _check_router_losses(config: Config, where: str) -> None:
    """The load-balancing loss needs both its name and a positive weight."""
    kind, weight = config.model.moe_router_load_balancing_type, config.model.moe_aux_loss_coeff
    if (kind == "aux_loss") != (weight > 0):
        raise UserError(
            f"model.moe_router_load_balancing_type {kind!r} with moe_aux_loss_coeff {weight:g}",
            where=where,
            fix='set "aux_loss" and a coefficient above 0, or leave both out',
        )


def _check_data(config: Config, where: str) -> None:
    """The template contains {question}; all sources have a weight, or none."""
    if "{question}" not in config.data.template:
        raise UserError(
            f"data.template {config.data.template!r} has no {{question}}",
            where=where,
            fix="put {question} where the question goes",
        )
    weighted = [source.weight is not None for source in config.data.train]
    if any(weighted) and not all(weighted):
        source = config.data.train[weighted.index(False)]
        raise UserError(
            f"data.train: {source.path!r} has no weight, but other sources have one",
            where=where,
            fix="give every source a weight, or none",
        )


def _check_checkpoints(config: Config, where: str) -> None:
    """checkpoint.resume exists; checkpoint.best_metric is measured."""
    resume, best = config.checkpoint.resume, config.checkpoint.best_metric
    if resume not in ("none", "newest") and not Path(resume).is_dir():
        raise UserError(
            f"checkpoint.resume {resume!r} is not a directory",
            where=where,
            fix='give the directory of a checkpoint, "newest" or "none"',
        )
    metrics = EVALUATED if config.evaluate.samples_per_prompt else EVALUATED[:1]
    measured = [f"eval/{name}/{metric}" for name in config.evaluate.data for metric in metrics]
    if best and best not in measured:
        raise UserError(
            f"checkpoint.best_metric {best!r} is not a metric of a set in evaluate.data",
            where=where,
            fix=f"name one of {', '.join(measured)}" if measured else "name a set in evaluate.data, or leave it empty",
        )
    if best and config.evaluate.every_steps == 0:
        raise UserError(
            f"checkpoint.best_metric is {best!r}, but evaluate.every_steps is 0, so nothing is evaluated",
            where=where,
            fix="set evaluate.every_steps to 1 or more, or leave best_metric empty",
        )


def _check_profile(config: Config, where: str) -> None:
    """The run has the steps to be profiled."""
    log = config.log
    first, end = log.profile_step_start, log.profile_step_end
    if log.profile == "none":
        return
    if end <= first:
        raise UserError(
            f"log.profile_step_end {end} is not above log.profile_step_start {first}, so no step would be profiled",
            where=where,
            fix="raise log.profile_step_end, the first step that is no longer profiled",
        )
    if end > config.num_steps:
        raise UserError(
            f"log.profile_step_end {end} is above num_steps {config.num_steps}",
            where=where,
            fix="lower it; steps are counted from 0",
        )


def _check_samples(config: Config, where: str) -> None:
    """Options of [rollout] that exclude each other."""
    rollout = config.rollout
    for first, second in (("replay", "only"), ("replay", "servers")):
        if getattr(rollout, first) and getattr(rollout, second):
            raise UserError(
                f"rollout.{first} and rollout.{second} exclude each other, because a replay samples nothing",
                where=where,
                fix="leave one of them out",
            )
    if rollout.dynamic_sampling and config.group_size == 1:
        raise UserError(
            "group_size is 1, but rollout.dynamic_sampling needs groups with different rewards",
            where=where,
            fix="set group_size to 2 or more, or rollout.dynamic_sampling to false",
        )
