"""Overrides from the command line, and checks across sections of a configuration. Imports no torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from oblr_megatron.config.baselines import facts_of
from oblr_megatron.config.lora import lora_problems
from oblr_megatron.config.norm_modes import mode_problem
from oblr_megatron.config.parallel_checks import parallel_problems
from oblr_megatron.config.precision_checks import precision_problems
from oblr_megatron.config.reward import reads_answers
from oblr_megatron.config.without_effect import without_effect
from oblr_megatron.errors import Problem, UserError

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.config.rollout import RolloutConfig

COMMAND_LINE = "command line"
EVALUATED = ("accuracy", "mean_at_k", "pass_at_k", "maj_at_k")
"""Metrics of each held-out set; only the first needs no sampled responses."""


def apply_override(table: dict[str, Any], override: str) -> None:
    """Set one dotted key. The value is read as TOML, or as a plain string if it is no TOML (paths, names)."""
    key, sign, text = override.partition("=")
    *parents, leaf = key.strip().split(".")
    if not sign or not all((*parents, leaf)):
        raise UserError(
            f"override {override!r} is not section.key=value", where=COMMAND_LINE, fix="write e.g. optimizer.lr=1e-6"
        )
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # no TOML, an integer of too many digits, too many brackets
        parsed = {}
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise UserError(
                f"{parent!r} is a value, not a section, in override {override!r}",
                where=COMMAND_LINE,
                fix=f"set {parent} as a whole, or write it as a table in the file",
            )
    table[leaf] = parsed["value"] if parsed.keys() == {"value"} else text.strip()


def blamed(where: str, overrides: Sequence[str], *, key: str = "", text: str = "") -> str:
    """Where a wrong value came from: the command line if an override sets it, else `where`.

    Args:
        where: the file.
        overrides: section.key=value strings.
        key: the wrong one; a section's key is blamed for all keys in it.
        text: a problem of several keys instead, which names them.
    """
    given = [override.partition("=")[0].strip() for override in overrides]
    names = {name for one in given for name in (one, one.rpartition(".")[2])}
    if key:
        overridden = any(f"{one}.".startswith(f"{key}.") or f"{key}.".startswith(f"{one}.") for one in given)
    else:
        overridden = any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) for name in names)
    return COMMAND_LINE if overridden else where


def problems(config: Config) -> Iterator[Problem]:
    """All contradictions between fields."""
    baseline = facts_of(config.algo.baseline)
    if config.group_size == 1 and baseline.needs_group:
        what = f"group_size is 1, but baseline {config.algo.baseline!r} needs other responses in the group"
        yield what, 'set group_size to 2 or more, or algo.baseline to "pooled" or "none"'
    if baseline.prior and config.num_prompts == 1:
        what = f"num_prompts is 1, but baseline {config.algo.baseline!r} takes its prior from the other prompts"
        yield what, 'set num_prompts to 2 or more, or algo.baseline to "optimal" or "rloo"'
    yield from _coefficients(config)
    yield from _thinning(config)
    yield from parallel_problems(config)
    folds = config.algo.snr.num_folds
    if config.algo.snr.reads_num_folds and config.num_prompts % folds:
        what = f"num_prompts {config.num_prompts} is not a multiple of algo.snr.num_folds {folds}"
        yield what, "change one of them; folds hold equally many whole prompts"
    snr, fewest = config.algo.snr, config.num_prompts if config.algo.snr.estimator == "prompts" else folds
    if config.algo.schedule == "snr" and snr.estimator in ("folds", "plugin", "prompts") and fewest < 2:
        what = f'algo.schedule "snr" with one fold (algo.snr.estimator {snr.estimator!r}): the noise stays unknown'
        yield what, 'set algo.snr.num_folds and num_prompts to 2 or more, or algo.snr.estimator to "momentum"'
    yield from _updates(config)
    yield from _centering(config)
    yield from _samples(config)
    yield from _checkpoints(config)
    yield from _data(config)
    yield from _profile(config)
    yield from precision_problems(config)
    yield from lora_problems(config)
    optimizer = config.optimizer
    if optimizer.offload != "none" and not (optimizer.keeps_moments or config.model.dtype == "bfloat16"):
        what = 'optimizer.offload "sampling" has nothing to move: SGD without momentum keeps no state for '
        yield f"{what}{config.model.dtype} weights", 'set optimizer.offload to "none"'
    push, patience = config.rollout.push_timeout_s, config.parallel.distributed_timeout_s
    if push >= patience:
        yield (
            f"rollout.push_timeout_s {push:g} is not below parallel.distributed_timeout_s {patience:g}: ranks that "
            "gather weights would time out before the rank that waits for its engine",
            "lower the first or raise the second",
        )


def biases(config: Config) -> Iterator[str]:
    """Allowed options that bias the gradient, keep nothing or have no effect, one line each, for a run's start."""
    rollout, facts, penalty = config.rollout, facts_of(config.algo.baseline), config.algo.kl_coefficient
    if rollout.overlap == "one_step":
        yield (
            'rollout.overlap "one_step" biases gradient, signal and noise: samples are one update old, and importance '
            f'ratios correct that in part (cut at {rollout.importance_cap:g}); "stream" has no such bias'
        )
    if config.algo.updates_per_batch > 1:
        yield (
            f"algo.updates_per_batch {config.algo.updates_per_batch} biases the gradient of all updates but the first: "
            "they use samples of an earlier policy; signal and noise are those of the first"
        )
    if rollout.max_staleness and rollout.importance_sampling == "none" and not rollout.only:
        yield (
            f"rollout.max_staleness {rollout.max_staleness} without rollout.importance_sampling biases the gradient "
            "if samples are of an earlier policy: nothing corrects them"
        )
    if rollout.rejection != "none":
        yield (
            f'rollout.rejection "{rollout.rejection}" biases the gradient: it leaves out what has an importance ratio '
            "outside its band; importance_sampling alone has a smaller bias and a larger variance"
        )
    if config.algo.clips and config.algo.updates_per_batch == 1:
        yield (
            f"the clipping of algo.preset {config.algo.preset!r} has no effect with algo.updates_per_batch 1: pi_old "
            "is the policy itself, also for samples that are one update old; set it to 2 or more"
        )
    if config.algo.norm_power:
        yield (
            f"algo.norm_power {config.algo.norm_power:g} biases the gradient towards responses with small norms, for "
            "less noise; 0 is unbiased"
        )
    if rollout.dynamic_sampling and not (facts.zero_on_equal and not penalty):
        cause = "algo.kl_coefficient" if facts.zero_on_equal else f"baseline {config.algo.baseline!r}"
        yield (
            "rollout.dynamic_sampling biases the gradient's direction: it drops groups of equal rewards, which have a "
            f'gradient under {cause}; algo.baseline = "optimal" or "rloo" without a KL penalty has none there'
        )
    if rollout.filters and not config.replays_support:
        filters = ", ".join(f"{name} {value:g}" for name, value in rollout.filters.items())
        yield (
            f"a filter of [rollout] ({filters}) biases the gradient: tokens outside it are never drawn, so the mean "
            "score is not 0; with a rollout.top_k of 1 to 1,024 it does not"
        )
    saves = config.checkpoint
    if not (saves.every_steps or saves.best_metric or saves.exit_before_timeout_s or saves.export_hf or rollout.only):
        yield "checkpoint.every_steps 0 and export_hf false: the run leaves no weights; set one of them to keep these"
    yield from without_effect(config)


def _coefficients(config: Config) -> Iterator[Problem]:
    """Norms and coefficients that suit the mode, the measured share and the "samples" estimator."""
    if problem := mode_problem(config, config.gradnorm.mode):
        yield f"gradnorm.mode {config.gradnorm.mode!r}: {problem[0]}", problem[1]
    if config.gradnorm.sample_fraction < 1 and config.reads_own_norms:
        yield (
            f"gradnorm.sample_fraction is below 1, but {config.reads_own_norms} reads every norm of its step",
            'set algo.baseline to "pooled" and algo.norm_power to 0, or gradnorm.sample_fraction to 1',
        )
    if config.algo.snr.estimator == "samples" and not (config.measures_norms or config.rollout.only):
        yield (
            f"algo.snr.estimator 'samples' needs gradient norms, but baseline {config.algo.baseline!r} measures none",
            'set gradnorm.always to true and gradnorm.source to "exact", or algo.snr.estimator to "folds"',
        )
    if config.gradnorm.sample_fraction < 1 and config.algo.snr.estimator == "samples":
        yield (
            "gradnorm.sample_fraction is below 1, but algo.snr.estimator 'samples' needs the norm of every response",
            'set gradnorm.sample_fraction to 1, or algo.snr.estimator to "folds"',
        )


def _thinning(config: Config) -> Iterator[Problem]:
    """Options that `algo.keep` below 1 excludes."""
    algo, reason = config.algo, ""
    if algo.keep == 1:
        return
    if config.reads_own_norms:
        reason = f"{config.reads_own_norms} reads the norms of all responses of its step"
    elif config.gradnorm.sample_fraction < 1:
        reason = "gradnorm.sample_fraction below 1 already chooses the responses with norms"
    elif algo.updates_per_batch > 1:
        reason = "algo.updates_per_batch above 1 clips by coefficients of all responses"
    elif algo.kl_coefficient:
        reason = "the KL penalty (algo.kl_coefficient) has a gradient of every response"
    elif config.model.router_losses:
        reason = "a router loss (model.moe_aux_loss_coeff, moe_z_loss_coeff) is a mean over the tokens of all responses"
    elif config.rollout.overlap == "stream":
        reason = 'rollout.overlap "stream" begins before all coefficients are known'
    if reason:
        yield f"algo.keep {algo.keep:g} leaves out responses, but {reason}", "set algo.keep to 1, or change the other"


def _data(config: Config) -> Iterator[Problem]:
    """The template contains {question}; all sources have a weight, or none; and no setting is without effect."""
    data = config.data
    if "{question}" not in data.template:
        yield f"data.template {data.template!r} has no {{question}}", "put {question} where the question goes"
    for key in ("system_prompt", "chat_template_options"):
        if getattr(data, key) and not data.chat_template:
            what = f"data.{key} is for the tokenizer's chat template, but data.chat_template is false"
            yield what, f"set data.chat_template to true, or leave {key} out"
    if config.evaluate.every_steps and not config.evaluate.data:
        what = f"evaluate.every_steps is {config.evaluate.every_steps}, but evaluate.data names no set"
        yield what, "name a set in evaluate.data, or set every_steps to 0"
    for source in (*data.exclude, *config.evaluate.data.values()):
        if source.weight is not None:
            what = f"the source {source.path!r} has a weight, but only sources of data.train are mixed by weights"
            yield what, "leave it out"
    weighted = [source.weight is not None for source in data.train]
    if any(weighted) and not all(weighted):
        source = data.train[weighted.index(False)]
        what = f"data.train: {source.path!r} has no weight, but other sources have one"
        yield what, "give every source a weight, or none"


def _checkpoints(config: Config) -> Iterator[Problem]:
    """checkpoint.best_metric is measured."""
    best = config.checkpoint.best_metric
    metrics = EVALUATED if config.evaluate.samples_per_prompt else EVALUATED[:1]
    measured = [f"eval/{name}/{metric}" for name in config.evaluate.data for metric in metrics]
    if best.endswith("/maj_at_k") and best in measured and not reads_answers(config.reward.name):
        what = f"checkpoint.best_metric {best!r} is never measured: reward.name {config.reward.name!r} reads no answers"
        yield what, "name the set's accuracy, mean_at_k or pass_at_k"
    if best and best not in measured:
        fix = f"name one of {', '.join(measured)}" if measured else "name a set in evaluate.data, or leave it empty"
        yield f"checkpoint.best_metric {best!r} is not a metric of a set in evaluate.data", fix
    if best and config.rollout.replay is not None:
        what = f"checkpoint.best_metric is {best!r}, but a replay (rollout.replay) evaluates nothing"
        yield what, "leave best_metric empty"
    elif best and config.evaluate.every_steps == 0:
        what = f"checkpoint.best_metric is {best!r}, but evaluate.every_steps is 0, so nothing is evaluated"
        yield what, "set evaluate.every_steps to 1 or more, or leave best_metric empty"


def _profile(config: Config) -> Iterator[Problem]:
    """The run has the steps to be profiled."""
    first, end = config.log.profile_step_start, config.log.profile_step_end
    if config.log.profile == "none":
        return
    if end <= first:
        what = f"log.profile_step_end {end} is not above log.profile_step_start {first}, so no step would be profiled"
        yield what, "raise log.profile_step_end, the first step that is no longer profiled"
    if end > config.num_steps:
        what = f"log.profile_step_end {end} is above num_steps {config.num_steps}"
        yield what, "lower it; steps are counted from 0"


def _samples(config: Config) -> Iterator[Problem]:
    """Options of [rollout] that exclude each other."""
    rollout = config.rollout
    for first, second in (("replay", "only"), ("replay", "servers")):
        if getattr(rollout, first) and getattr(rollout, second):
            what = f"rollout.{first} and rollout.{second} exclude each other, because a replay samples nothing"
            yield what, "leave one of them out"
    if rollout.overlap != "none" and rollout.only:
        what = f"rollout.overlap {rollout.overlap!r} with rollout.only: no gradient is computed while engines sample"
        yield what, 'set rollout.overlap to "none"'
    elif rollout.overlap == "stream":
        yield from _streaming(config)
    elif rollout.overlap == "one_step":
        yield from _one_step(rollout)
    if rollout.rejection == "none" and (rollout.rejection_low, rollout.rejection_high) != (None, 2.0):
        what = 'rollout.rejection_low and rejection_high are the band of rollout.rejection, which is "none"'
        yield what, 'set rollout.rejection to "token", "sequence" or "geometric", or leave the band out'
    yield from _environment(config)
    if rollout.min_p and rollout.speculation != "none":
        what = f"rollout.min_p with rollout.speculation {rollout.speculation!r}: vLLM refuses min_p when it speculates"
        yield what, 'set rollout.min_p to 0 and use top_p or top_k, or rollout.speculation to "none"'
    if rollout.dynamic_sampling and config.group_size == 1:
        what = "group_size is 1, but rollout.dynamic_sampling needs groups with different rewards"
        yield what, "set group_size to 2 or more, or rollout.dynamic_sampling to false"


def _environment(config: Config) -> Iterator[Problem]:
    """Options that an environment needs, and options that work with single responses alone."""
    rollout, rewards = config.rollout, config.reward.names
    options = rollout.environment
    if not options.function:
        if "environment" in rewards:
            what = 'the reward "environment" is what an environment gives, but rollout.environment is not set'
            yield what, "name the environment, or another reward"
        if options.tools:
            what = "rollout.environment.tools are of use to an environment alone, but it has no function"
            yield what, 'set rollout.environment.function = "tool_loop"'
        return
    if options.deadline_s >= rollout.generate_timeout_s:
        what = f"rollout.environment.deadline_s {options.deadline_s:g} is not below rollout.generate_timeout_s"
        yield f"{what} {rollout.generate_timeout_s:g}, which all episodes of a batch share", "raise the latter"
    if options.function == "tool_loop" and "environment" in rewards:
        what = 'the environment "tool_loop" gives no reward, but the reward "environment" reads the function\'s'
        yield what, "name a reward that reads the last turn's text, such as math"
    if rollout.speculation != "none":
        what = f"rollout.environment with rollout.speculation {rollout.speculation!r} is not supported"
        yield what, 'set rollout.speculation to "none"'
    if config.model.moe_routing_replay:
        what = "rollout.environment with model.moe_routing_replay is not supported: a turn does not carry its experts"
        yield what, "set model.moe_routing_replay to false"
    if rollout.servers:
        what = "rollout.environment with rollout.servers is not supported"
        yield what, "leave rollout.servers out, so that the run starts its own engines"


def _one_step(rollout: RolloutConfig) -> Iterator[Problem]:
    """Samples that are one update old are allowed and corrected."""
    what = 'rollout.overlap "one_step" trains on samples that are one update old, but '
    if rollout.replay is not None:
        yield 'rollout.overlap "one_step" with rollout.replay: nothing is sampled', 'set rollout.overlap to "none"'
    elif rollout.max_staleness < 1:
        yield what + "rollout.max_staleness is 0", "set rollout.max_staleness to 1"
    elif rollout.importance_sampling == "none":
        yield what + "they are not corrected", 'set rollout.importance_sampling to "token" or "sequence"'


def _streaming(config: Config) -> Iterator[Problem]:
    """Options that `stream` refuses, because they need the whole batch."""
    algo, facts, name = config.algo, facts_of(config.algo.baseline), config.algo.baseline
    reason = ""
    if facts.prior or facts.over == "batch":
        reason = f"algo.baseline {name!r} reads the rewards of all prompts"
    elif facts.divisor in ("batch_std", "centred_std"):
        reason = f"algo.baseline {name!r} divides by the standard deviation over all prompts"
    elif algo.aggregation == "token_mean":
        reason = 'algo.aggregation "token_mean" divides by the tokens of all responses'
    elif config.model.router_losses:
        reason = "a router loss (model.moe_aux_loss_coeff, moe_z_loss_coeff) is a mean over the tokens of all responses"
    elif config.parallel.overlap_grad_reduce:
        reason = "parallel.overlap_grad_reduce sums the gradient over replicas once, in the last backward pass"
    if reason:
        yield (
            f'{reason}, but with rollout.overlap "stream" the gradient begins before the batch is complete',
            'set rollout.overlap to "none", or choose e.g. algo.baseline "pooled" and algo.aggregation "constant"',
        )


def _updates(config: Config) -> Iterator[Problem]:
    """Options that several updates on a batch exclude, and options that have no effect without them."""
    algo, updates = config.algo, config.algo.updates_per_batch
    if updates == 1:
        if algo.clips and algo.preset is None:  # a preset may be run with a single update
            what = "algo.clip_low, clip_high, clip_dual, ratio and surrogate act on a batch's later updates, but "
            yield what + "algo.updates_per_batch is 1", "set algo.updates_per_batch to 2 or more, or leave them out"
        return
    what = f"algo.updates_per_batch {updates}"
    if config.num_prompts % updates:
        yield f"{what} does not divide num_prompts {config.num_prompts}", "change one of them"
    elif algo.snr.reads_num_folds and config.per_update.num_prompts % algo.snr.num_folds:
        yield (
            f"{what} leaves {config.per_update.num_prompts} prompts for each update, which is not a multiple of "
            f"algo.snr.num_folds {algo.snr.num_folds}",
            "lower one of them, or raise num_prompts",
        )
    if algo.clip_dual is not None and algo.surrogate == "cispo":
        yield 'algo.clip_dual has no effect with algo.surrogate "cispo"', "leave it out"
    yield from _on_policy_only(config, what)


def _centering(config: Config) -> Iterator[Problem]:
    """Options that `algo.center` excludes."""
    algo, rollout = config.algo, config.rollout
    if not algo.center:
        return
    for key in ("importance_sampling", "rejection"):
        level = getattr(rollout, key)
        if level not in ("none", "token"):
            yield (
                f"algo.center with rollout.{key} {level!r}: the weight of a token then depends on later tokens, so its "
                "expectation at a prefix is not known",
                f'set rollout.{key} to "token", or algo.center to false',
            )
    if algo.updates_per_batch > 1:
        what = f"algo.center with algo.updates_per_batch {algo.updates_per_batch}: clipping depends on the advantage"
        yield what, "set algo.updates_per_batch to 1, or algo.center to false"


def _on_policy_only(config: Config, what: str) -> Iterator[Problem]:
    """Options that need every update to be the first one on its samples."""
    algo = config.algo
    if config.uses_norms:
        cause = "gradnorm.always" if config.gradnorm.always else f"algo.baseline {algo.baseline!r}"
        if algo.norm_power:
            cause = f"algo.norm_power {algo.norm_power:g}"
        yield (
            f"{what} with {cause}: norms measured before the first update are not those of later ones",
            'set algo.baseline to e.g. "rloo" or "grpo", gradnorm.always to false and algo.norm_power to 0, or '
            "algo.updates_per_batch to 1",
        )
    if algo.schedule not in ("constant", "cosine"):
        yield (
            f"{what} with algo.schedule {algo.schedule!r}, which takes its rates from signal and noise of the policy",
            'set algo.schedule to "constant" or "cosine", or algo.updates_per_batch to 1',
        )
    if config.rollout.overlap != "none":
        yield (
            f"{what} with rollout.overlap {config.rollout.overlap!r}: mini-batches need the whole batch, with the "
            "weights it was sampled from",
            'set rollout.overlap to "none", or algo.updates_per_batch to 1',
        )
